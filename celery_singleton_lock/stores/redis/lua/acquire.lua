-- Take a place at the lock, or a turn in its queue, or say who holds it.
--
-- The lock is one hash. Times in it are microseconds by this server's clock.
--   limit, fence          how many may hold it, and the last fence given
--   <place>               token of the holder that has the place, 1..limit; a
--                         token that begins with ~ is a place on hold by nobody
--   <token>               deadline of that holder; under !<token> once it has been asked to make way
--   <place>:<name>        fence, since, ttl (in milliseconds) and the facts of that holder
--   first, last           range of the tickets in the queue, if there is one
--   q<ticket>             deadline, token and task id of a waiter
--   next, next:args       deadline and task id of the successor, whose message is in the broker; newest arguments for it
--   queued                deadline and task id of the call that is unique in the queue
--   quiet                 until when, and by which call, the key is published no more
-- A free place belongs to the successor, then to the waiter whose turn it is.
-- Asking again with the same token renews a grant and keeps a turn, so a caller
-- whose reply was lost may simply repeat itself.
--
-- KEYS[1]  lock key
-- ARGV[1]  token, fresh for each execution
-- ARGV[2]  ttl in milliseconds
-- ARGV[3]  limit
-- ARGV[4]  what to do where no place is free: `skip` to go without, `queue`, `rerun` or
--          `replace` to become the successor
-- ARGV[5]  task id of the caller, or an empty text
-- ARGV[6]  arguments of the caller for `rerun`, or an empty text where it has asked before
-- ARGV[7]  this server's time when the caller first asked to be the successor, or 0
-- ARGV[8]  1 if calls are unique in the queue, so that a free place belongs to the one that is queued, or 0
-- ARGV[9]  facts about the caller from here on: name, value, name, value, ...
--
-- Returns  {1, now, place, fence, took_over, since, arguments}  granted; newest arguments, or an empty text
--          {2, now, wait}                 queued: ask again when woken, or after `wait` microseconds
--          {0, now, {field, value, ...}}  held: the hash as it is
--          {-1, now, limit}               held under another limit

local GRACE = 2000000 -- a waiter may be this late for its turn
local PATIENCE = 30000000 -- a successor that has not come again for so long is given up

local key, token, ttl, limit = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local known = redis.call('HMGET', key, 'limit', 'fence', 'first', 'last', 'next', 'queued', 'quiet')
local known_limit = tonumber(known[1] or limit)

local function integer(number)
  return string.format('%.0f', number)
end

local function deadline_of(candidate, holder)
  local fields = redis.call('HMGET', key, holder, candidate .. ':ttl', '!' .. holder)
  local deadline = tonumber(fields[1] or fields[3])
  local latest = now + tonumber(fields[2]) * 1000
  if deadline > latest and string.sub(holder, 1, 1) ~= '~' then
    -- This server's clock was set back; the holder may be dead, and must not stay for the difference.
    deadline = latest
    redis.call('HSET', key, fields[1] and holder or '!' .. holder, integer(deadline))
  end
  return deadline
end

local place, corpse, free, soonest = nil, nil, known[1] and 0 or limit, now + ttl * 1000
for candidate = 1, known[1] and known_limit or 0 do
  local holder = redis.call('HGET', key, candidate)
  local deadline = holder and deadline_of(candidate, holder)
  if holder == token then
    local grant = redis.call('HMGET', key, candidate .. ':fence', candidate .. ':since', candidate .. ':args', token)
    redis.call('PEXPIRE', key, 2 * ttl, 'GT')
    redis.call('HSET', key, grant[4] and token or '!' .. token, integer(now + ttl * 1000))
    return {1, now, candidate, tonumber(grant[1]), 0, tonumber(grant[2]), grant[3] or ''}
  elseif holder and deadline > now then
    soonest = math.min(soonest, deadline)
  else
    free = free + 1
    if not place then
      place, corpse = candidate, holder
    end
  end
end

local ahead, ticket = 0, nil
for candidate = tonumber(known[3] or 1), tonumber(known[4] or 0) do
  local waiter = redis.call('HGET', key, 'q' .. candidate)
  if waiter then
    local deadline, whose = string.match(waiter, '^(%d+) (%S+)')
    if whose == token then
      ticket = candidate
      break
    elseif tonumber(deadline) > now then
      ahead = ahead + 1
      if free > 0 then
        soonest = math.min(soonest, tonumber(deadline))
      end
    else
      redis.call('HDEL', key, 'q' .. candidate)
    end
  end
end

local successor, mine, has_asked = nil, ARGV[5], ARGV[7] ~= '0'
if known[5] then
  local deadline, whose = string.match(known[5], '^(%d+) (.*)$')
  if tonumber(deadline) <= now or (ARGV[4] == 'replace' and not has_asked) then
    redis.call('HDEL', key, 'next', 'next:args')
  else
    successor = whose
    if whose ~= mine then
      ahead = ahead + 1
      soonest = free > 0 and math.min(soonest, tonumber(deadline)) or soonest
    end
  end
end

local queued = known[6] and string.match(known[6], '^%d+ (.*)$')
if queued and queued ~= mine and ARGV[8] == '1' then
  local deadline = tonumber(string.match(known[6], '^%d+'))
  if deadline > now then
    ahead = ahead + 1
    soonest = free > 0 and math.min(soonest, deadline) or soonest
  end
end

local arguments = successor == mine and redis.call('HGET', key, 'next:args') or ''

local function ask_to_make_way()
  local oldest, whose = now, nil
  for candidate = 1, known_limit do
    local holder = redis.call('HGET', key, candidate)
    if holder and string.sub(holder, 1, 1) ~= '~' and deadline_of(candidate, holder) > now then
      local since = tonumber(redis.call('HGET', key, candidate .. ':since'))
      if redis.call('HEXISTS', key, '!' .. holder) == 1 then
        return
      elseif since < oldest then
        oldest, whose = since, holder
      end
    end
  end
  if whose then
    redis.call('HSET', key, '!' .. whose, redis.call('HGET', key, whose))
    redis.call('HDEL', key, whose)
  end
end

local function somebody_newer_runs()
  for candidate = 1, known_limit do
    if tonumber(redis.call('HGET', key, candidate .. ':since') or 0) > tonumber(ARGV[7]) then
      return true
    end
  end
  return false
end

local function ask_to_succeed()
  if successor and successor ~= mine then
    if not has_asked then
      redis.call('HSET', key, 'next:args', ARGV[6])
    end
    return
  elseif not successor then
    if has_asked and somebody_newer_runs() then
      return
    end
    redis.call('HSET', key, 'next:args', ARGV[6])
  end
  redis.call('HSET', key, 'next', integer(now + PATIENCE) .. ' ' .. mine)
  redis.call('PEXPIRE', key, math.ceil(PATIENCE / 1000), 'GT')
  if ARGV[4] == 'replace' then
    ask_to_make_way()
  end
end

if known[1] and known_limit ~= limit then
  if free < known_limit or ahead > 0 then
    return {-1, now, known_limit}
  end
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if field ~= 'queued' and field ~= 'quiet' then
      redis.call('HDEL', key, field)
    end
  end
  place, corpse = nil, nil
elseif ahead >= free then
  if ARGV[4] ~= 'queue' then
    if ARGV[4] ~= 'skip' then
      ask_to_succeed()
    end
    return {0, now, redis.call('HGETALL', key)}
  end
  local first, last = tonumber(known[3] or 1), tonumber(known[4] or 0)
  ticket = ticket or last + 1
  local turn = integer(soonest + GRACE) .. ' ' .. token .. ' ' .. ARGV[5]
  redis.call('HSET', key, 'limit', limit, 'q' .. ticket, turn, 'first', first, 'last', math.max(last, ticket))
  redis.call('PEXPIRE', key, math.ceil((soonest + GRACE - now) / 1000), 'GT')
  return {2, now, soonest - now}
end

place = place or 1
if corpse then
  redis.call('HDEL', key, corpse, '!' .. corpse)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.match(field, '^(%d+):') == tostring(place) then
      redis.call('HDEL', key, field)
    end
  end
end
if ticket then
  redis.call('HDEL', key, 'q' .. ticket)
end
local fence = math.max(tonumber(known[2] or 0) + 1, now)
local fields = {
  place, token, token, integer(now + ttl * 1000), 'limit', limit, 'fence', integer(fence),
  place .. ':fence', integer(fence), place .. ':since', integer(now), place .. ':ttl', ttl,
}
if arguments ~= '' then
  fields[#fields + 1] = place .. ':args'
  fields[#fields + 1] = arguments
end
for i = 9, #ARGV, 2 do
  fields[#fields + 1] = place .. ':' .. ARGV[i]
  fields[#fields + 1] = ARGV[i + 1]
end
redis.call('HSET', key, unpack(fields)) -- before other writes, so that a server out of memory refuses it
if successor == mine then
  redis.call('HDEL', key, 'next', 'next:args')
end
if queued == mine then
  redis.call('HDEL', key, 'queued')
end
local nobody_waits = ahead == 0 and (not ticket or ticket == tonumber(known[4]))
if nobody_waits and known[3] then
  redis.call('HDEL', key, 'first', 'last')
end
if free == known_limit and nobody_waits and (not queued or queued == mine) and not known[7] then
  redis.call('PEXPIRE', key, 2 * ttl)
elseif redis.call('PEXPIRE', key, 2 * ttl, 'NX') == 0 then
  redis.call('PEXPIRE', key, 2 * ttl, 'GT')
end
return {1, now, place, fence, corpse and string.sub(corpse, 1, 1) ~= '~' and 1 or 0, now, arguments}
