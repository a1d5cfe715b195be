-- Give a place back, if it is still the caller's.
--
-- A caller that knows its place names it twice. One whose acquire was never
-- answered looks through all of them, from 1 to its limit.
--
-- KEYS[1]  lock key
-- ARGV[1]  token given to acquire.lua
-- ARGV[2]  first place to look at
-- ARGV[3]  last place to look at
--
-- Returns  1 released | 0 another token has the place | -1 nobody has it

local key, token = KEYS[1], ARGV[1]
local answer = -1

for place = tonumber(ARGV[2]), tonumber(ARGV[3]) do
  local known = redis.call('HMGET', key, place .. ':token', 'limit')
  if known[1] == token then
    if known[2] ~= '1' then
      for _, field in ipairs(redis.call('HKEYS', key)) do
        if string.match(field, '^(%d+):') == tostring(place) then
          redis.call('HDEL', key, field)
        end
      end
    end
    if known[2] == '1' or redis.call('HLEN', key) == 2 then -- limit and fence: nobody is left
      redis.call('DEL', key)
    end
    return 1
  elseif known[1] then
    answer = 0
  end
end
return answer
