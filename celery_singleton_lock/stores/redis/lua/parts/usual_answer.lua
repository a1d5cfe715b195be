-- The usual answers: the key does not exist, so nobody can be in the way; or it has only what the usual grant has
-- written.
local key, token, ttl = KEYS[1], ARGV[1], ARGV[2]
local size = KEYS[2] and -1 or call('HLEN', key)
if size == 0 then
  local fence = format('%d', now)
  -- One write before all others, so that a server out of memory refuses it as a whole.
  call(
    'HSET', key, '1', token, token, format('%d', now + ttl * 1000), 'fence', fence,
    '1:', fence .. ' 0 ' .. ttl .. ' ' .. ARGV[4], '1:i', ARGV[5], '1:h', ARGV[6]
  )
  if ARGV[7] and ARGV[7] ~= '' then
    call('HSET', key, '1:n', ARGV[7])
  end
  call('PEXPIRE', key, format('%d', 2 * ttl))
  return now
elseif size == 6 and ARGV[3] == '1' then
  -- The fields come in the order of that write, unless something else was written since.
  local known = call('HGETALL', key)
  local holder = known[2]
  local is_usual = known[1] == '1' and known[3] == holder and known[5] == 'fence' and known[7] == '1:'
    and known[9] == '1:i' and known[11] == '1:h'
  if is_usual and holder ~= token then
    local left = known[4] - now
    if left > 0 and left <= ttl * 1000 then
      return {0, now, 0, '', {1, holder, known[4], known[8], known[10], known[12], ''}}
    end
  end
end
