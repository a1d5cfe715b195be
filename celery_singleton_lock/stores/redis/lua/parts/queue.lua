-- The queue of a lock: who waits for it, first come, first served.
--   first, last   range of the tickets, as long as there are any
--   q<ticket>     deadline, token, limit, 1 once another delivery of its message has come or else 0, and task id of a waiter
--   w<token>      its ticket
-- A `Lock`, or a run in its slot, waits under its token. A message that waits in the broker has a turn under `@` and its
-- task id, which outlives the execution that took it; in place of the token stands `@`, for how many seconds the turn
-- lasts, and how many microseconds after its publication it was taken; or `!` once it was called. Such a turn is
--   on its way     nobody listens yet, for ON_ITS_WAY after a refusal; then it is listened for, or passed over
--   listened for   until it is called by a release, by whoever finds a place free, or as its message looks
--   called         for CALLED; then it is granted, or refused and on its way again, or passed over
--   passed over    gone; if its message comes after all, it has its old place, or the one before all others
local GRACE = 2000000 -- a waiter may be this late for its turn
local NEAR = 8 -- so many wake by themselves at the next deadline; the rest wait to be woken, and look once in a ttl
local NEXT_FEW = 3 -- so many messages look by themselves every few seconds
local LONGEST_WALK = 200 -- so many tickets are read by one script
local MOST_TURNS = 5000
local ON_ITS_WAY = 2000000 -- for so long a message goes from its refusal through the broker to a worker that listens
local CALLED = 3000000 -- a message that was called has so long to come
local MOST_CALLED = 16 -- so many are called at once
local AT_ONE_MOMENT = 20 -- so many are looked at for one that was published later, and refused in the same moment

-- Turns that this script finds over because their messages were called and have not come. Their worker has no free
-- process, or is paused, and the turns behind them may be its own as well: twice as many are called in their place, and
-- whoever comes first is granted.
local missed = 0

local function in_place_of_missed()
  return math.min(2 * missed, MOST_CALLED)
end

local function waiter_in(value)
  local deadline, token, limit, copies, task_id = string.match(value or '', '^(%d+) (%S+) (%d+) (%d) (.*)$')
  if not deadline then
    return
  end
  local waiter = {deadline = tonumber(deadline), token = token, limit = tonumber(limit), copies = copies, task_id = task_id}
  local lasts, after = string.match(token, '^@(%d+),(%d+)$')
  if lasts or token == '!' then
    waiter.token, waiter.word = '@' .. task_id, token
  end
  if lasts then
    waiter.taken = waiter.deadline - lasts * 1000000
    waiter.published = waiter.taken - after
  end
  return waiter
end

local function write_waiter(key, ticket, waiter)
  local moment = integer(waiter.deadline)
  local turn = table.concat({moment, waiter.word or waiter.token, waiter.limit, waiter.copies, waiter.task_id}, ' ')
  return redis.call('HSET', key, 'q' .. ticket, turn, 'w' .. waiter.token, ticket)
end

local function set_called(key, ticket, waiter)
  waiter.word, waiter.deadline, waiter.taken = '!', now + CALLED, nil
  write_waiter(key, ticket, waiter)
end

-- Wake a waiter, or call a message; false if it is dead, because nobody listens. If we may use no channel, that is not known.
local function wakes(key, ticket, waiter)
  if waiter.word == '!' then
    return true
  end
  local listeners = redis.pcall('PUBLISH', key .. ':' .. waiter.token, 'free')
  if waiter.word and listeners == 0 then
    return waiter.taken > now - ON_ITS_WAY
  elseif waiter.word then
    set_called(key, ticket, waiter)
  end
  return listeners ~= 0
end

-- A turn that was found to be over in this very script is written again where it was, before the last one.
local function join_queue(key, ticket, last, waiter)
  if write_waiter(key, ticket, waiter) > 0 and ticket > last then
    redis.call('HSETNX', key, 'first', ticket)
    redis.call('HSET', key, 'last', ticket)
  end
  expire_after(key, waiter.deadline - now)
end

-- A queue begins with a ticket that is greater than those of the queues before it, so that a turn which was passed over,
-- and comes after all, finds its place.
local function ticket_after(last)
  return last and last + 1 or math.floor(now / 10000) % 100000000 + 1000
end

local function leave_queue(key, ticket, token)
  redis.call('HDEL', key, 'q' .. ticket, 'w' .. token)
end

-- The queue begins at a later ticket now. Waiters that are near the front now have to learn the next deadline.
local function begin_queue_at(key, first, front, last)
  if front > last then
    redis.call('HDEL', key, 'first', 'last')
  elseif front > first then
    redis.call('HSET', key, 'first', front)
    for _, near in ipairs({NEXT_FEW, NEAR}) do
      for ticket = math.max(first + near, front), math.min(front + near - 1, last) do
        local waiter = waiter_in(redis.call('HGET', key, 'q' .. ticket))
        if waiter and near == (waiter.word and NEXT_FEW or NEAR) then
          redis.pcall('PUBLISH', key .. ':' .. waiter.token, 'near')
        end
      end
    end
  end
end

-- Visit the living waiters in order until `visit` says `enough`. Dead waiters are removed, and those for which
-- `visit` says `gone`, so each of them is paid for once; where some live, the walk gives up after a number of tickets.
-- Returns the first ticket that is not known to be void.
local function walk_queue(key, first, last, visit)
  local front
  for start = first, last, LONGEST_WALK do
    for i, value in ipairs(read_numbered(key, 'q', start, math.min(last, start + LONGEST_WALK - 1), '')) do
      local waiter, ticket = waiter_in(value), start + i - 1
      if waiter then
        local is_over = waiter.deadline <= now
        if is_over and waiter.word == '!' then
          missed = missed + 1
        end
        local verdict = is_over and 'gone' or visit(waiter, ticket)
        if verdict == 'gone' then
          leave_queue(key, ticket, waiter.token)
        else
          front = front or ticket
        end
        if verdict == 'enough' then
          return front
        end
      end
    end
    if front then
      return front
    end
  end
  return math.max(first, last + 1)
end

-- Wake those whose turn it is, while so many places are held; and at least so many, to learn when a place will be free.
local function wake_next(key, first, last, held, least)
  local woken = 0
  local front = walk_queue(key, first, last, function(waiter, ticket)
    local free = waiter.limit - held
    local has_place = woken < (waiter.word and free > 0 and math.max(free, in_place_of_missed()) or free)
    if not has_place and woken >= least then
      return 'enough'
    elseif waiter.word and not has_place then
      redis.pcall('PUBLISH', key .. ':' .. waiter.token, 'near')
    elseif not wakes(key, ticket, waiter) then
      return 'gone'
    end
    woken = woken + places_of(waiter.token)
  end)
  begin_queue_at(key, first, front, last)
end

local function call_in_place_of_missed(key, first, last)
  local called = 0
  walk_queue(key, first, last, function(waiter, ticket)
    if called >= in_place_of_missed() then
      return 'enough'
    elseif waiter.word and not wakes(key, ticket, waiter) then
      return 'gone'
    end
    called = called + (waiter.word and 1 or 0)
  end)
end

-- The turn of a message that is refused: the one that it has; or, if it was passed over, the one that it had, or the place
-- before all others; or a new one, which goes before those that were published later and refused in the same moment.
-- Returns its ticket, or nil if there are too many turns.
local function keep_turn(key, first, last, had, waiter, ticket)
  if not ticket and first and had > 0 and had <= last then
    ticket = had > first - LONGEST_WALK / 2 and had or math.max(first - 1, 1)
    if redis.call('HEXISTS', key, 'q' .. ticket) == 1 then
      ticket = nil
    elseif ticket < first then
      redis.call('HSET', key, 'first', ticket)
    end
  end
  if ticket then
    join_queue(key, ticket, last or ticket, waiter)
    return ticket
  elseif first and last - first >= MOST_TURNS then
    return
  end
  ticket = ticket_after(last)
  join_queue(key, ticket, last or 0, waiter)
  for before = ticket - 1, math.max(first or ticket, ticket - AT_ONE_MOMENT), -1 do
    local other = waiter_in(redis.call('HGET', key, 'q' .. before))
    if not (other and other.taken and other.taken > now - ON_ITS_WAY and other.published > waiter.published) then
      break
    end
    write_waiter(key, before, waiter)
    write_waiter(key, before + 1, other)
    ticket = before
  end
  return ticket
end
