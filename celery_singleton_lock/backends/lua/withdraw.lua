-- Be no longer the one who is next.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id of the successor
--
-- Returns  1 withdrawn | 0 somebody else is next, or nobody

local successor = redis.call('HGET', KEYS[1], 'next')
if not successor or string.match(successor, '^%d+ (.*)$') ~= ARGV[1] then
  return 0
end
return math.min(1, redis.call('HDEL', KEYS[1], 'next', 'next:args'))
