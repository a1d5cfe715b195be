-- The line of a lock has a turn for each call that waits, ordered by rank, the moment of the first refusal. leases/line.py has
-- the table of a turn's states.
--
--   `q<ticket>`              `<rank> <state><since> <lasts> <before> <limit> <copies> <token>\31<task id>`. `since`:
--                            milliseconds after the rank. `lasts`: seconds after it. `before`: microseconds from the
--                            publication to the rank. `copies`: 1 once another delivery has come. `token`: `@` for a
--                            message.
--   `w<who>`                 a ticket. `who` is the token of a process, or `@<task id>` for a message.
--   `first` to `front` - 1   tickets of UNHEARD turns, or void. Walks begin at `front`.
--   `front` to `last`        tickets of the other turns, or void
--
-- On the channel `<key>:<who>`, `free` wakes a turn. `near` tells a waiter to look: its turn is among the next few.
local WAITING, WOKEN, COMING, UNHEARD = 'w', 'c', 'o', 'u'
local NEXT_FEW = 3 -- turns at the front that look every few seconds, because a wake may get lost
local LONGEST_WALK = 80 -- tickets that a walk reads, so that it takes less than a millisecond
local MOST_TURNS = 5000 -- in one lock; a call beyond them polls
local ON_ITS_WAY = 2000000 -- time for a refused message to reach a worker that listens
local TIME_TO_COME = 3000000 -- time for a woken message to come
local MOST_WOKEN = 16 -- turns that are woken at once; those that find no place are requeued for nothing
local TIDIED_AT_ONCE = 20 -- tickets that a script tidies, so that it stays short

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

local function turn_at(key, ticket)
  local turn = read_turn(key, ticket)
  if turn and turn.deadline > now then
    return turn
  elseif turn then
    leave_line(key, ticket, turn.token)
  end
end

local function goes_before(turn, other)
  return turn.rank < other.rank or turn.rank == other.rank and turn.published < other.published
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

-- The front moves back to a turn that is heard again: otherwise no walk would find it.
local function write_heard(key, line, ticket, turn)
  line.front = math.min(line.front, ticket)
  write_turn(key, ticket, turn)
  set_range(key, line)
end

-- A newcomer yields to an UNHEARD turn until `since` + `ON_ITS_WAY`. A WOKEN or COMING turn has had that time.
local function set_unheard(key, ticket, turn)
  turn.state, turn.since = UNHEARD, turn.state == WAITING and now or turn.since
  write_turn(key, ticket, turn)
end

-- Returns how many listen; without the right to publish, assume that somebody does.
local function tell(key, turn, word)
  local listeners = redis.pcall('PUBLISH', key .. ':' .. turn.token, word)
  return type(listeners) == 'number' and listeners or 1
end

-- Returns false if nobody listens for the turn, now or soon.
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

-- Returns the first ticket that may have a turn. A full line loses its oldest unheard turns.
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

-- Let walks begin at `front`; `unheard` is the first turn that is left behind.
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

-- Visit turns until `visit` says `enough`. Returns true if the walk was too short to meet a turn that is heard.
--
-- A woken turn that has not come counts as missed: its worker is busy, paused or dead, and may have the next turns, too.
local function walk_line(key, line, from, last, visit)
  local front, unheard
  local stop = math.min(last, from + (from < line.front and 2 or 1) * LONGEST_WALK - 1)
  for ticket = from, stop do
    local turn = turn_at(key, ticket)
    if turn then
      if turn.state == WOKEN and turn.since <= now - TIME_TO_COME then
        line.missed = line.missed + 1
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

-- If places are free, wake as many turns, or two per missed turn if more. Returns true if more may have to be woken.
local function wake_next(key, line, held)
  local woken = 0
  return walk_line(key, line, line.front, line.last, function(turn, ticket)
    local free = turn.limit - held
    if turn.state == UNHEARD then
      return
    elseif woken >= (free > 0 and math.max(free, math.min(2 * line.missed, MOST_WOKEN)) or free) then
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
    line = first and {first = first, last = last, front = front, missed = 0},
    successor = successor_in(known[6]), queued = mark_of(known[7]), cooldown = mark_of(known[8], 'cooldown'),
    ticket = tonumber(known[9] or nil),
  }
end
