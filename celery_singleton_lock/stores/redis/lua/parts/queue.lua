-- Turns, ordered by rank: the moment of the call's first refusal, in microseconds.
--   `q<ticket>`            `<rank> <state><since> <lasts> <waited> <limit> <has_copy> <token>\31<task id>`
--     since                milliseconds from the rank to the beginning of the state; 0 if WAITING
--     lasts                seconds from the rank to the deadline
--     waited               microseconds from the publication to the rank
--     has_copy             1 once another delivery has come
--     token                of a process; `@` for a message
--   `w<who>`               ticket; `who` is the token, or `@<task id>` for a message
--   `first`, `last`        range of the tickets, some without a turn
--   `front`                ticket before which all turns are UNHEARD: they were woken in vain
--   channel `<key>:<who>`  `free` wakes the turn; `near` makes its process poll
local WAITING, WOKEN, COMING, UNHEARD = 'w', 'c', 'o', 'u' -- see docs/explanation/how-it-works.md
local NEXT_FEW = 3 -- turns at the front that poll, because a wake may get lost
local LONGEST_WALK = 80 -- tickets; longer walks would block the server
local MOST_TURNS = 5000 -- of one lock; calls beyond them poll
local ON_ITS_WAY = 2000000 -- microseconds until a worker listens for a refused message
local TIME_TO_COME = 3000000 -- microseconds in which a woken call has to come
local MOST_WOKEN = 16 -- turns woken at once in place of missed turns; more would be requeued in vain
local SKIPPED_AT_ONCE = 20 -- tickets without a turn that one script skips

local function read_turn(key, ticket)
  local value = call('HGET', key, 'q' .. ticket) or ''
  local rank, state, since, lasts, waited, limit, has_copy, token, task_id =
    string.match(value, '^(%d+) (%a)(%-?%d+) (%-?%d+) (%-?%d+) (%d+) (%d) ([^ \31]+)[^\31]*\31(.*)$')
  if rank then
    rank = tonumber(rank)
    return {
      rank = rank, state = state, since = rank + since * 1000, deadline = rank + lasts * 1000000, published = rank - waited,
      limit = tonumber(limit), has_copy = has_copy, who = token == '@' and '@' .. task_id or token, task_id = task_id,
      is_message = token == '@', value = value, holder_state = 'waiting',
    }
  end
end

local function leave_line(key, ticket, who)
  call('HDEL', key, 'q' .. ticket, 'w' .. who)
end

local function turn_in_time(key, ticket)
  local turn = read_turn(key, ticket)
  if turn and turn.deadline > now then
    return turn
  elseif turn then
    leave_line(key, ticket, turn.who)
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
  local lasts, waited = math.ceil((turn.deadline - turn.rank) / 1000000), turn.rank - turn.published
  local numbers = format('%.0f %s%.0f %.0f %.0f %d %s ', turn.rank, turn.state, since, lasts, waited, turn.limit, turn.has_copy)
  local value = numbers .. (turn.is_message and '@' or turn.who) .. '\31' .. turn.task_id
  call('HSET', key, 'q' .. ticket, value, 'w' .. turn.who, ticket)
end

-- A turn that is heard again moves the front back; otherwise no walk would find the turn.
local function write_heard(key, line, ticket, turn)
  line.front = math.min(line.front, ticket)
  write_turn(key, ticket, turn)
  set_range(key, line)
end

-- A newcomer yields to an UNHEARD turn until `since` + ON_ITS_WAY. A turn that was WAITING gets that time from now on.
-- A WOKEN or COMING turn has had that time, and keeps its `since`.
local function set_unheard(key, ticket, turn)
  turn.state, turn.since = UNHEARD, turn.state == WAITING and now or turn.since
  write_turn(key, ticket, turn)
end

-- Returns the number of listeners, or 1 if an ACL forbids PUBLISH.
local function tell(key, turn, word)
  local listeners = redis.pcall('PUBLISH', key .. ':' .. turn.who, word)
  return type(listeners) == 'number' and listeners or 1
end

-- Returns false if the turn is now UNHEARD.
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
    local turn = turn_in_time(key, ticket)
    if turn then
      tell(key, turn, 'near')
    end
  end
end

-- A full line loses its oldest UNHEARD turns.
local function first_in_use(key, line)
  local stop = math.min(line.front, line.first + SKIPPED_AT_ONCE) - 1
  for ticket = line.first, stop do
    local turn = turn_in_time(key, ticket)
    if turn and line.last - ticket < MOST_TURNS then
      return ticket
    elseif turn then
      leave_line(key, ticket, turn.who)
    end
  end
  return stop + 1
end

local function move_front(key, line, front, first_unheard)
  local before = line.front
  front = math.max(front, before)
  local first = first_in_use(key, line)
  if first == before then
    first = math.min(first_unheard or front, front)
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

-- Returns true if the walk has met only UNHEARD turns, and more tickets follow.
local function walk_line(key, line, from, last, visit)
  local front, first_unheard
  local stop = math.min(last, from + (from < line.front and 2 or 1) * LONGEST_WALK - 1)
  for ticket = from, stop do
    local turn = turn_in_time(key, ticket)
    if turn then
      if turn.state == WOKEN and turn.since <= now - TIME_TO_COME then
        line.missed = line.missed + 1
        set_unheard(key, ticket, turn)
      end
      local verdict = visit(turn, ticket)
      if turn.state == UNHEARD then
        first_unheard = first_unheard or ticket
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
    move_front(key, line, front or stop + 1, first_unheard)
  end
  return not front and stop < last
end

-- Wakes a turn for each free place, or two for each missed turn if that is more.
-- The worker that missed its turns may be dead, and have the next turns, too.
local function wake_next(key, line, taken)
  local woken = 0
  return walk_line(key, line, line.front, line.last, function(turn, ticket)
    local free = turn.limit - taken
    if turn.state == UNHEARD then
      return
    elseif free <= 0 or woken >= math.max(free, math.min(2 * line.missed, MOST_WOKEN)) then
      return 'enough'
    elseif wake_turn(key, ticket, turn) then
      woken = woken + places_taken_by(turn.who)
    end
  end)
end

local function read_lock(key, who)
  local known = call(
    'HMGET', key, 'fence', 'places', 'first', 'last', 'front', 'next', 'queued', 'cooldown', 'w' .. who
  )
  local first, last, front = tonumber(known[3]), tonumber(known[4]), tonumber(known[5])
  return {
    fence = known[1], places = read_places(key, tonumber(known[2] or 1)),
    line = first and {first = first, last = last, front = front, missed = 0},
    successor = successor_in(known[6]), queued = mark_in(known[7]), cooldown = mark_in(known[8], 'cooldown'),
    ticket = tonumber(known[9]),
  }
end

-- Deletes the hash if only the fence and ended marks are left.
local function delete_if_idle(key)
  local known, many = call('HMGET', key, 'queued', 'cooldown', 'next', 'fence'), 0
  for i = 1, 4 do
    many = many + (known[i] and 1 or 0)
  end
  local successor = successor_in(known[3])
  local is_in_force = mark_in(known[1]) or mark_in(known[2])
    or successor and math.max(successor.deadline, successor.supersedes_until) > now
  if not is_in_force and call('HLEN', key) == many then
    call('DEL', key)
  end
end
