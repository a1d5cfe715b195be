-- The usual acquire: nothing is known of the key, so nobody can be in the way.
if not KEYS[2] and redis.call('EXISTS', KEYS[1]) == 0 then
  local time = redis.call('TIME')
  local fence = string.format('%.0f', time[1] * 1000000 + time[2])
  local deadline = string.format('%.0f', fence + ARGV[2] * 1000)
  local place = fence .. ' 0 ' .. ARGV[2] .. ' ' .. ARGV[5]
  -- One write before all others, so that a server out of memory refuses it as a whole.
  redis.call('HSET', KEYS[1], 1, ARGV[1], ARGV[1], deadline, 'fence', fence, '1:', place, unpack(ARGV, 8))
  redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2])
  return tonumber(fence)
end
