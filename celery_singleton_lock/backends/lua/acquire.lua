-- Take a free place at the lock, or say who holds them all.
--
-- The lock is one hash. It has `limit` and `fence` (the last one given), and
-- for each place 1..limit that is or was held the fields `<place>:token`,
-- `<place>:deadline`, `<place>:fence`, `<place>:since` and the holder's facts.
-- Times are microseconds by this server's clock. Asking again with the same
-- token renews the grant instead of competing with it, so a caller whose
-- reply was lost may simply repeat itself.
--
-- KEYS[1]  lock key
-- ARGV[1]  token, fresh for each execution
-- ARGV[2]  ttl in milliseconds
-- ARGV[3]  limit: how many may hold the lock at once
-- ARGV[4]  facts about the caller from here on: name, value, name, value, ...
--
-- Returns  {1, now, place, fence, took_over, since}  granted
--          {0, now, field, value, ...}               held: the hash as it is
--          {-1, now, limit}                          held under another limit

local key, token, ttl, limit = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local known = redis.call('HMGET', key, 'limit', 'fence')
local known_limit = tonumber(known[1] or limit)

local place, took_over, live = nil, 0, 0
for candidate = 1, known_limit do
  local holder = redis.call('HMGET', key, candidate .. ':token', candidate .. ':deadline', candidate .. ':fence', candidate .. ':since')
  if holder[1] == token then
    redis.call('PEXPIRE', key, 2 * ttl, 'GT')
    redis.call('HSET', key, candidate .. ':deadline', string.format('%.0f', now + ttl * 1000))
    return {1, now, candidate, tonumber(holder[3]), 0, tonumber(holder[4])}
  elseif holder[1] and tonumber(holder[2]) > now then
    live = live + 1
  elseif not place then
    place, took_over = candidate, holder[1] and 1 or 0
  end
end

if live > 0 and known_limit ~= limit then
  return {-1, now, known_limit}
elseif not place then
  local held = redis.call('HGETALL', key)
  return {0, now, unpack(held)}
elseif known_limit ~= limit then
  redis.call('DEL', key)
  place = 1
end

local fence = math.max(tonumber(known[2] or 0) + 1, now)
local fields = {
  'limit', limit,
  'fence', string.format('%.0f', fence),
  place .. ':token', token,
  place .. ':deadline', string.format('%.0f', now + ttl * 1000),
  place .. ':fence', string.format('%.0f', fence),
  place .. ':since', string.format('%.0f', now),
}
for i = 4, #ARGV, 2 do
  fields[#fields + 1] = place .. ':' .. ARGV[i]
  fields[#fields + 1] = ARGV[i + 1]
end
redis.call('HSET', key, unpack(fields))
if live == 0 or redis.call('PTTL', key) < 2 * ttl then
  redis.call('PEXPIRE', key, 2 * ttl)
end
return {1, now, place, fence, took_over, now}
