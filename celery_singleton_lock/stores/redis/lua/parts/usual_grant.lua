-- The usual acquire: nothing is known of the key, so nobody can be in the way.
if not KEYS[2] and redis.call('EXISTS', KEYS[1]) == 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local fence, deadline = string.format('%d', now), string.format('%d', now + ARGV[2] * 1000)
  -- One write before all others, so that a server out of memory refuses it as a whole.
  redis.call(
    'HSET', KEYS[1], 1, ARGV[1], ARGV[1], deadline, 'fence', fence,
    '1:', fence .. ' 0 ' .. ARGV[2] .. ' ' .. ARGV[4], '1:i', ARGV[5], '1:h', ARGV[6]
  )
  if ARGV[7] and ARGV[7] ~= '' then
    redis.call('HSET', KEYS[1], '1:n', ARGV[7])
  end
  redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2])
  return now
end
