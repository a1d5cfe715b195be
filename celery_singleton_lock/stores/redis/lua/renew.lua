-- Restart the ttl of each lease, if it is still the caller's.
--
-- A token is a field of the lock's hash while its lease lasts. Then HSET of its deadline adds no field, and answers 0.
--
-- KEYS[i]    lock key of lease i
-- ARGV[1]    ttl of all of them, in milliseconds
-- ARGV[i+1]  token of lease i
--
-- Returns  an answer for each lease, and then the time of this server in microseconds. The answers:
--          1 renewed | 2 renewed, a successor asks the holder to stop | 4 renewed, a person asks the holder to stop
--          0 lost, another caller has the lock, or another program has written its key | -1 lost, nobody has the lock

-- @include time
local deadline = format('%.0f', now + ARGV[1] * 1000)
local expiry = format('%.0f', 2 * ARGV[1])
local answers = {}

-- A server out of memory refuses HSET as the first write of a script, and allows HDEL.
redis.pcall('HDEL', KEYS[1], '')
for i, key in ipairs(KEYS) do
  local written = redis.pcall('HSET', key, ARGV[i + 1], deadline)
  if written == 0 then
    call('PEXPIRE', key, expiry, 'GT')
    answers[i] = 1
  elseif written ~= 1 then
    -- A key that is no hash any more ends only its own lease.
    if not string.find(written.err, 'WRONGTYPE', 1, true) then
      return written
    end
    answers[i] = 0
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
