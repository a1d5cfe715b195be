-- Add a batch of numbers, once.
--
-- A batch that comes again, because its answer was lost, is known by its number.
--
-- KEYS[1]  hash of counts
-- ARGV[1]  field with the last batch of the process
-- ARGV[2]  process and number of this one
-- ARGV[3]  milliseconds for which to keep the hash
-- ARGV[4]  field and amount, of each number
--
-- Returns  1 added | 0 it was added before

if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
for i = 4, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
