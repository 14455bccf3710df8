-- ARGV: generations. Each leaves every structure at once; what is in flight is refunded.
if not is_ready() then
  return NOT_READY
end

for _, generation in ipairs(ARGV) do
  local entry = find(generation)
  if entry then
    discard(generation, entry, true)
  end
end

return 0
