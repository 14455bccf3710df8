-- ARGV: per pop: generation, pop id. Puts back and refunds what is still in flight under exactly this pop.
if not is_ready() then
  return NOT_READY
end

for i = 1, #ARGV, 2 do
  if is_popped_as(ARGV[i], ARGV[i + 1]) then
    put_back(ARGV[i], find(ARGV[i]))
  end
end

publish_news()
return 0
