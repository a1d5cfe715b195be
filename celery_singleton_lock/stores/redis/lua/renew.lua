-- Restart the ttl of each lease that is still the caller's.
--
-- KEYS[i]    lock key
-- ARGV[1]    ttl in milliseconds
-- ARGV[i+1]  token
--
-- Returns a `Renewal` for each lease, and then `now`.

-- @include time
local deadline = format('%.0f', now + ARGV[1] * 1000)
local expiry = format('%.0f', 2 * ARGV[1])
local RENEWED, REPLACED, BROKEN, TAKEN, GONE = 1, 2, 4, 0, -1
local answers = {}

-- HDEL comes first; otherwise a server out of memory would refuse HSET.
redis.pcall('HDEL', KEYS[1], '')
for i, key in ipairs(KEYS) do
  -- HSET returns 1 if the token is missing, because the lease was lost or its holder was asked to stop.
  local written = redis.pcall('HSET', key, ARGV[i + 1], deadline)
  if written == 0 then
    call('PEXPIRE', key, expiry, 'GT')
    answers[i] = RENEWED
  elseif written ~= 1 then
    -- A key of another program must not prevent the other renewals.
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
