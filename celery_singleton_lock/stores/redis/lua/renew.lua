-- Restart the ttl of each lease, if it is still the caller's.
--
-- KEYS[i]    lock key of lease i
-- ARGV[1]    ttl of all leases, in milliseconds
-- ARGV[i+1]  token of lease i
--
-- Returns a `Renewal` for each lease, and then the time of this server in microseconds.

-- @include time
local deadline = format('%.0f', now + ARGV[1] * 1000)
local expiry = format('%.0f', 2 * ARGV[1])
local RENEWED, REPLACED, BROKEN, TAKEN, GONE = 1, 2, 4, 0, -1
local answers = {}

-- HDEL first: a server out of memory refuses HSET as the first write of a script.
redis.pcall('HDEL', KEYS[1], '')
for i, key in ipairs(KEYS) do
  -- HSET answers 0 if the field was there: the lease is the caller's, and nobody has asked the caller to stop.
  local written = redis.pcall('HSET', key, ARGV[i + 1], deadline)
  if written == 0 then
    call('PEXPIRE', key, expiry, 'GT')
    answers[i] = RENEWED
  elseif written ~= 1 then
    -- Another program's key costs only the lease on that key.
    if not string.find(written.err, 'WRONGTYPE', 1, true) then
      return written
    end
    answers[i] = TAKEN
  else
    call('HDEL', key, ARGV[i + 1])
    if call('HEXISTS', key, '!' .. ARGV[i + 1]) == 1 then
      call('HSET', key, '!' .. ARGV[i + 1], deadline)
      call('PEXPIRE', key, expiry, 'GT')
      answers[i] = call('HEXISTS', key, 'broken:' .. ARGV[i + 1]) == 1 and BROKEN or REPLACED
    else
      answers[i] = call('EXISTS', key) == 1 and TAKEN or GONE
    end
  end
end
answers[#KEYS + 1] = now
return answers
