-- Restart the ttl of each lease, if it is still the caller's.
--
-- A token is a field of the lock's hash for as long as nobody else has got its place.
-- So the write of its deadline tells whether the token was there.
--
-- KEYS[i]    lock key of lease i
-- ARGV[1]    ttl of all of them, in milliseconds
-- ARGV[i+1]  token of lease i
--
-- Returns  for each lease
--          1 renewed | 2 renewed, and asked to stop | 4 the same, but by a person | 0 the lock is somebody else's,
--          or another program has written its key | -1 nobody has it
--          and then the time of this server, in microseconds

-- @include time
local deadline = format('%.0f', now + ARGV[1] * 1000)
local expiry = format('%.0f', 2 * ARGV[1])
local answers = {}

-- Does nothing, but a server out of memory allows this write, and it does not allow
-- HSET as the first write of a script.
redis.pcall('HDEL', KEYS[1], '')
for i, key in ipairs(KEYS) do
  local written = redis.pcall('HSET', key, ARGV[i + 1], deadline)
  if written == 0 then
    call('PEXPIRE', key, expiry, 'GT')
    answers[i] = 1
  elseif written ~= 1 then
    -- A key that is no hash any more ends its own lease. Anything else concerns them all.
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
