-- Be no longer the one who is next, or queued.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  1 to let others be published at once, as after a failure to publish, or 0
--
-- Returns  1 withdrawn | 0 somebody else is next and queued, or nobody

local key, mine, answer = KEYS[1], ARGV[1], 0
local known = redis.call('HMGET', key, 'next', 'queued', 'quiet')

local function is_mine(value)
  return value and string.match(value, '^%d+ (.*)$') == mine
end

if is_mine(known[1]) then
  redis.call('HDEL', key, 'next', 'next:args')
  answer = 1
end
if is_mine(known[2]) then
  redis.call('HDEL', key, 'queued')
  answer = 1
end
if is_mine(known[3]) and ARGV[2] == '1' then
  redis.call('HDEL', key, 'quiet')
end
return answer
