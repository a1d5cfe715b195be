-- The usual answers: nothing is known of the key, so nobody can be in the way; or the usual grant has left all that is.
local size = KEYS[2] and -1 or redis.call('HLEN', KEYS[1])
if size == 0 then
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
elseif size == 6 and ARGV[3] == '1' then
  -- In the order of that write, unless something else has been written since.
  local known = redis.call('HGETALL', KEYS[1])
  local token = known[2]
  local is_usual = known[1] == '1' and known[3] == token and known[5] == 'fence' and known[7] == '1:'
    and known[9] == '1:i' and known[11] == '1:h'
  if is_usual and token ~= ARGV[1] then
    local left = known[4] - now
    if left > 0 and left <= ARGV[2] * 1000 then
      return {0, now, 0, '', {1, token, known[4], known[8], known[10], known[12], ''}}
    end
  end
end
