-- The line of a lock: a turn for each call that waits, in the order of their ranks. A ticket may be void.
--
--   tickets                    turns there
--   `first` to `front` - 1     UNHEARD: nobody listens for them, so walks begin at `front`
--   `front` to `front` + 2     near: they look every few seconds, because a wake may get lost
--   up to `last`               the others, which look once in a ttl; a newcomer joins here
--
-- Fields:
--   `q<ticket>`  a turn: the moment of its rank; its state, and since when, in milliseconds after the rank; its end, in
--                seconds after the rank. Then: how many microseconds before the rank the call was published; limit; 1 if
--                another delivery of the message has come, or 0; the token of a process, or `@`. Fields of later versions
--                may follow. Then '\31' and the task id.
--   `w<who>`     the ticket of a token, or of `@` and a task id.
--
-- A waiter listens on the channel of its turn, `<key>:<who>`. `free` says that the turn has come. After `near` the waiter
-- looks, to learn when a place will be free. A message in the broker has a turn under `@` and its task id, because it outlives
-- the execution that took the turn. A rank is the moment of the first refusal. leases/line.py has the table of the states.
local WAITING, WOKEN, COMING, UNHEARD = 'w', 'c', 'o', 'u'
local NEXT_FEW = 3 -- turns at the front that look for themselves every few seconds
local LONGEST_WALK = 80 -- tickets that one walk reads, so that it takes less than a millisecond
local MOST_TURNS = 5000 -- bounds the memory of one lock; a call beyond them has no turn, and polls
local ON_ITS_WAY = 2000000 -- time for a refused message to reach a worker that listens
local TIME_TO_COME = 3000000 -- time for a message to come once its turn was woken
local MOST_WOKEN = 16 -- turns that are woken at once; those that find no place are requeued for nothing
local TIDIED_AT_ONCE = 20 -- tickets that one script tidies, so that it stays short

-- How many woken turns have not come. Their worker, which is busy or paused, may have the next turns too, so twice as many
-- others are woken.
local missed = 0

local function read_turn(key, ticket)
  local value = call('HGET', key, 'q' .. ticket) or ''
  local rank, state, since, lasts, before, limit, copies, token, task_id =
    string.match(value, '^(%d+) (%a)(%-?%d+) (%-?%d+) (%-?%d+) (%d+) (%d) ([^ \31]+)[^\31]*\31(.*)$')
  if rank then
    rank = tonumber(rank)
    return {
      rank = rank, state = state, since = rank + since * 1000, deadline = rank + lasts * 1000000, published = rank - before,
      limit = tonumber(limit), copies = copies, token = token == '@' and '@' .. task_id or token, task_id = task_id,
      is_message = token == '@', value = value, word = 'waiting',
    }
  end
end

local function leave_line(key, ticket, token)
  call('HDEL', key, 'q' .. ticket, 'w' .. token)
end

-- A turn that is over leaves the line.
local function turn_at(key, ticket)
  local turn = read_turn(key, ticket)
  if turn and turn.deadline > now then
    return turn
  elseif turn then
    leave_line(key, ticket, turn.token)
  end
end

local function goes_before(turn, other)
  if turn.rank ~= other.rank then
    return turn.rank < other.rank
  end
  return turn.published < other.published or turn.published == other.published and turn.token < other.token
end

local function set_range(key, line)
  call('HSET', key, 'first', line.first, 'last', line.last, 'front', line.front)
end

local function write_turn(key, ticket, turn)
  local since = turn.state == WAITING and 0 or math.floor((turn.since - turn.rank) / 1000)
  local lasts, before = math.ceil((turn.deadline - turn.rank) / 1000000), turn.rank - turn.published
  local numbers = format('%.0f %s%.0f %.0f %.0f %d %s ', turn.rank, turn.state, since, lasts, before, turn.limit, turn.copies)
  local value = numbers .. (turn.is_message and '@' or turn.token) .. '\31' .. turn.task_id
  call('HSET', key, 'q' .. ticket, value, 'w' .. turn.token, ticket)
end

-- Write a turn that is heard. Walks begin at it, or before.
local function write_heard(key, line, ticket, turn)
  line.front = math.min(line.front, ticket)
  write_turn(key, ticket, turn)
  set_range(key, line)
end

-- A newcomer yields to an UNHEARD turn until `ON_ITS_WAY` after its `since`. For a waiting turn that time begins now. A
-- WOKEN or COMING turn keeps its `since`, so no newcomer yields to it.
local function set_unheard(key, ticket, turn)
  turn.state, turn.since = UNHEARD, turn.state == WAITING and now or turn.since
  write_turn(key, ticket, turn)
end

-- Returns how many listen. Without the right to publish, assume that somebody does.
local function tell(key, turn, word)
  local listeners = redis.pcall('PUBLISH', key .. ':' .. turn.token, word)
  return type(listeners) == 'number' and listeners or 1
end

-- False if nobody listens. True for a turn on its way: its worker will listen soon.
local function wake_turn(key, ticket, turn)
  if turn.state == WOKEN then
    return true
  elseif tell(key, turn, 'free') > 0 then
    turn.state, turn.since = WOKEN, now
    write_turn(key, ticket, turn)
    return true
  elseif turn.state == COMING and turn.since > now - ON_ITS_WAY then
    return true
  end
  set_unheard(key, ticket, turn)
  return false
end

local function tell_near(key, from, last)
  for ticket = from, last do
    local turn = turn_at(key, ticket)
    if turn then
      tell(key, turn, 'near')
    end
  end
end

-- The first ticket up to the front that is not known to be void. A full line loses its oldest unheard turns.
local function tidied(key, line)
  local stop = math.min(line.front, line.first + TIDIED_AT_ONCE) - 1
  for ticket = line.first, stop do
    local turn = turn_at(key, ticket)
    if turn and line.last - ticket < MOST_TURNS then
      return ticket
    elseif turn then
      leave_line(key, ticket, turn.token)
    end
  end
  return stop + 1
end

-- Let walks begin at a later ticket; `unheard` is the first turn that was left behind.
local function begin_line_at(key, line, front, unheard)
  local before = line.front
  front = math.max(front, before)
  local first = tidied(key, line)
  if first == before then
    first = math.min(unheard or front, front)
  end
  local is_moved = first > line.first or front > before
  line.first, line.front = first, front
  if first > line.last then
    call('HDEL', key, 'first', 'last', 'front')
  elseif is_moved then
    begin_writing(key)
    set_range(key, line)
  end
  tell_near(key, math.max(before + NEXT_FEW, front), math.min(front + NEXT_FEW - 1, line.last))
end

-- Visit the turns from a ticket on until `visit` says `enough`. A walk reads `LONGEST_WALK` tickets, or twice as many if it
-- begins before the front. Returns whether it met unheard turns only, and more follow.
local function walk_line(key, line, from, last, visit)
  local front, unheard
  local stop = math.min(last, from + (from < line.front and 2 or 1) * LONGEST_WALK - 1)
  for ticket = from, stop do
    local turn = turn_at(key, ticket)
    if turn then
      if turn.state == WOKEN and turn.since <= now - TIME_TO_COME then
        missed = missed + 1
        set_unheard(key, ticket, turn)
      end
      local verdict = visit(turn, ticket)
      if turn.state == UNHEARD then
        unheard = unheard or ticket
      else
        front = front or ticket
      end
      if verdict == 'enough' then
        front = front or ticket
        break
      end
    end
  end
  if from <= line.front then
    begin_line_at(key, line, front or stop + 1, unheard)
  end
  return not front and stop < last
end

-- Wake the turns for free places; `held` places are taken. Returns whether more turns may have to be woken. The
-- client of a release then asks again. After any other script, the next turn finds the place when it looks.
local function wake_next(key, line, held)
  local woken = 0
  return walk_line(key, line, line.front, line.last, function(turn, ticket)
    local free = turn.limit - held
    if turn.state == UNHEARD then
      return
    elseif woken >= (free > 0 and math.max(free, math.min(2 * missed, MOST_WOKEN)) or free) then
      return 'enough'
    elseif wake_turn(key, ticket, turn) then
      woken = woken + places_of(turn.token)
    end
  end)
end

local function read_lock(key, who)
  local known = call(
    'HMGET', key, 'fence', 'places', 'first', 'last', 'front', 'next', 'queued', 'cooldown', 'w' .. who
  )
  local first, last, front = tonumber(known[3] or nil), tonumber(known[4] or nil), tonumber(known[5] or nil)
  return {
    fence = known[1], places = read_places(key, tonumber(known[2] or 1)),
    line = first and {first = first, last = last, front = front},
    successor = successor_in(known[6]), queued = mark_of(known[7]), cooldown = mark_of(known[8], 'cooldown'),
    ticket = tonumber(known[9] or nil),
  }
end
