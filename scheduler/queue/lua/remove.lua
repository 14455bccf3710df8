-- ARGV: generations. Each leaves every structure at once.
if not is_ready() then
  return NOT_READY
end

for _, generation in ipairs(ARGV) do
  local entry = find(generation)
  if entry then
    drop(generation, entry)
  end
end

return 0
