-- Give a place, or a turn in the queue, back; then wake the waiters whose turn it is.
--
-- A caller that knows its place names it twice. One whose acquire was never
-- answered looks through all of them, from 1 to its limit.
--
-- KEYS[1]  lock key
-- ARGV[1]  token given to acquire.lua
-- ARGV[2]  first place to look at
-- ARGV[3]  last place to look at
-- ARGV[4]  milliseconds for which the place stays taken, counted from when it was given
--
-- Returns  1 released | 0 the lock is somebody else's | -1 nobody has it

local key, token = KEYS[1], ARGV[1]
local known = redis.call('HMGET', key, 'limit', 'first', 'last', ARGV[2], 'next', 'queued', 'quiet')
if known[4] == token and known[1] == '1' and not known[2] and not known[5] and not known[6] and not known[7] and ARGV[4] == '0' then
  return redis.call('DEL', key)
end
if not known[1] then
  return -1
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answer, free, taken, first = 0, 0, 0, nil

local function leave(place)
  local free_at = tonumber(redis.call('HGET', key, place .. ':since')) + ARGV[4] * 1000
  redis.call('HDEL', key, place, token, '!' .. token)
  if free_at > now then
    -- Held until then by a token that nobody has, so nobody renews or releases it.
    redis.call('HSET', key, place, '~' .. token, '~' .. token, string.format('%.0f', free_at))
    redis.call('PEXPIRE', key, math.ceil((free_at - now) / 1000), 'GT')
    free = 1 -- not yet, but the first waiter has to hear when
    return
  end
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.match(field, '^(%d+):') == tostring(place) then
      redis.call('HDEL', key, field)
    end
  end
end

for place = tonumber(ARGV[2]), tonumber(ARGV[3]) do
  if redis.call('HGET', key, place) == token then
    leave(place)
    answer = 1
  end
end

for place = 1, tonumber(known[1]) do
  local holder = redis.call('HGET', key, place)
  taken = taken + (holder and 1 or 0)
  local deadlines = holder and redis.call('HMGET', key, holder, '!' .. holder)
  if not holder or tonumber(deadlines[1] or deadlines[2]) <= now then
    free = free + 1
  end
end

local function lies_ahead(value)
  return value and tonumber(string.match(value, '^%d+')) > now
end

local awaited = lies_ahead(known[5])
if awaited then
  free = free - 1 -- the successor has it
end

for ticket = tonumber(known[2] or 1), tonumber(known[3] or 0) do
  local waiter = redis.call('HGET', key, 'q' .. ticket)
  local whose = waiter and string.match(waiter, '^%d+ (%S+)')
  if whose == token then
    redis.call('HDEL', key, 'q' .. ticket)
    answer = 1
  elseif whose and free > 0 and redis.call('PUBLISH', key .. ':' .. whose, 'free') == 0 then
    -- Nobody listens for a waiter that is dead, so its turn passes on at once.
    redis.call('HDEL', key, 'q' .. ticket)
  elseif whose then
    free = free - 1
    first = first or ticket
  end
end

if first then
  redis.call('HSET', key, 'first', first)
elseif taken == 0 and not awaited and not lies_ahead(known[6]) and not lies_ahead(known[7]) then
  redis.call('DEL', key)
else
  redis.call('HDEL', key, 'first', 'last')
end
return answer
