-- The usual release: the hash is as the usual acquire has left it, so nobody waits and nothing else is known.
if redis.call('HLEN', KEYS[1]) == tonumber(ARGV[2]) and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
  return redis.call('DEL', KEYS[1])
end
