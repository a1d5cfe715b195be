-- Restart the ttl of each lease, if it is still the caller's.
--
-- A token is a field of the lock's hash exactly as long as its place has not
-- been given to anybody else, so writing its deadline tells whether it was there.
--
-- KEYS[i]    lock key of lease i
-- ARGV[1]    ttl of all of them, in milliseconds
-- ARGV[i+1]  token of lease i
--
-- Returns  for each lease
--          1 renewed | 2 renewed, and asked to make way | 4 the same, but by a person | 0 the lock is somebody else's |
--          -1 nobody has it
--          and then the time of this server, in microseconds

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local deadline = string.format('%.0f', now + ARGV[1] * 1000)
local expiry = string.format('%.0f', 2 * ARGV[1])
local answers = {}

-- Does nothing, but it is a write that is allowed when the server is out of
-- memory, and HSET, as the first write of a script, is not.
call('HDEL', KEYS[1], '')
for i, key in ipairs(KEYS) do
  if call('HSET', key, ARGV[i + 1], deadline) == 0 then
    call('PEXPIRE', key, expiry, 'GT')
    answers[i] = 1
  else
    call('HDEL', key, ARGV[i + 1])
    if call('HEXISTS', key, '!' .. ARGV[i + 1]) == 1 then
      call('HSET', key, '!' .. ARGV[i + 1], deadline)
      call('PEXPIRE', key, expiry, 'GT')
      answers[i] = call('HEXISTS', key, 'broken:' .. ARGV[i + 1]) == 1 and 4 or 2
    else
      answers[i] = call('EXISTS', key) - 1
    end
  end
end
answers[#KEYS + 1] = now
return answers
