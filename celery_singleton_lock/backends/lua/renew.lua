-- Start the ttl of each lease afresh, if it is still the caller's.
--
-- An expired lease is not revived and a missing one is not made again:
-- somebody else may have run in between.
--
-- KEYS[i]      lock key of lease i
-- ARGV[3i-2]   its token
-- ARGV[3i-1]   its place
-- ARGV[3i]     its ttl in milliseconds
--
-- Returns  {now, answer, ...}; for each lease
--          1 renewed | 0 another token has the place | -1 expired or gone

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answers = {now}

for i, key in ipairs(KEYS) do
  local token, place, ttl = ARGV[3 * i - 2], ARGV[3 * i - 1], tonumber(ARGV[3 * i])
  local holder = redis.call('HMGET', key, place .. ':token', place .. ':deadline')
  if holder[1] == token and tonumber(holder[2]) > now then
    -- First, because it is allowed when the server is out of memory and HSET,
    -- as a script's first write, is not.
    redis.call('PEXPIRE', key, 2 * ttl, 'GT')
    redis.call('HSET', key, place .. ':deadline', string.format('%.0f', now + ttl * 1000))
    answers[i + 1] = 1
  elseif holder[1] and holder[1] ~= token then
    answers[i + 1] = 0
  else
    answers[i + 1] = -1
  end
end
return answers
