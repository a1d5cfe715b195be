-- The usual release: the hash is as the usual acquire has left it, so nobody waits and there are no marks.
local call, key = redis.call, KEYS[1]
if call('HLEN', key) == ARGV[2] + 0 and call('HEXISTS', key, ARGV[1]) == 1 then
  return call('DEL', key)
end
