-- The line of a lock: turns, in the order of their ranks.
--   `first`, `last`  the range of the tickets, if there are any.
--   `front`          the ticket at which walks begin. Before it are only unheard turns.
--   `q<ticket>`      a turn: the moment of its rank; its state, and since when, in milliseconds after the rank; its end, in
--                    seconds after the rank; by how many microseconds it was published before the rank; limit; 1 if another
--                    delivery of its message has come, or 0; the token of a process, or `@`. Fields of later versions may
--                    follow. Then '\31' and the task id.
--   `w<who>`         the ticket of a token, or of `@` and a task id.
-- Whoever waits listens on the channel of its turn. `free` says that its turn has come. `near` says that the turn has become
-- one of the next few, or that the store has learned when a place will be free. The listener then asks when that will be.
-- A `Lock`, or a run in its slot, has a turn under its token. A message in the broker has one under `@` and its task id,
-- because it outlives the execution that took the turn. A rank is the moment of the first refusal; if two are equal,
-- the earlier publication goes first. A call that was published earlier, but refused within the same two seconds, takes
-- the rank of the call it goes before. The message carries its rank, and gets its position back if the store has lost
-- the turn. leases/line.py has the table of the states.
local line_in, turn_in, goes_before, write_turn, set_state, leave_line, wake_turn, walk_line, begin_line_at, wake_next
local set_range, keep_turn, read_lock
local WAITING, WOKEN, COMING, UNHEARD = 'w', 'c', 'o', 'u'
local NEXT_FEW = 3 -- turns at the front that look for themselves every few seconds
local LONGEST_WALK = 80 -- tickets that one walk reads, so that it takes less than a millisecond
local MOST_TURNS = 5000
local ON_ITS_WAY = 2000000 -- the time of a message from its refusal to a worker that listens
local TIME_TO_COME = 3000000 -- the time that a message has to come once its turn was woken
local MOST_WOKEN = 16 -- turns that are woken at once
local AT_ONE_MOMENT = 20 -- last tickets, searched for the position of a newcomer
local TIDIED_AT_ONCE = 20
local FIRST_TICKET = 1000 -- calls that come back may get smaller tickets, even below zero

-- How many woken turns have not come. Their worker has no free process, or is paused, and may have the turns behind them
-- too. So twice as many others are woken, and the first that comes is granted.
local missed = 0

-- The line of these fields; nil if nobody waits.
function line_in(first, last, front)
  if first then
    return {first = tonumber(first), last = tonumber(last), front = tonumber(front or first)}
  end
end

function turn_in(value)
  local known, task_id = string.match(value or '', '^([^\31]*)\31(.*)$')
  local rank, state, since, lasts, before, limit, copies, token =
    string.match(known or '', '^(%d+) (%a)(%-?%d+) (%-?%d+) (%-?%d+) (%d+) (%d) (%S+)')
  if rank then
    rank = tonumber(rank)
    return {
      rank = rank, state = state, since = rank + since * 1000, deadline = rank + lasts * 1000000, published = rank - before,
      limit = tonumber(limit), copies = copies, token = token == '@' and '@' .. task_id or token, task_id = task_id,
      is_message = token == '@', value = value, word = 'waiting',
    }
  end
end

function goes_before(turn, other)
  if turn.rank ~= other.rank then
    return turn.rank < other.rank
  elseif turn.published ~= other.published then
    return turn.published < other.published
  end
  return turn.token < other.token
end

function set_range(key, line)
  redis.call('HSET', key, 'first', line.first, 'last', line.last, 'front', line.front)
end

local function set_ticket(key, ticket, turn)
  redis.call('HSET', key, 'q' .. ticket, turn.value, 'w' .. turn.token, ticket)
end

local function value_of(turn)
  -- For a turn that waits nobody needs to know since when; a short value costs the server less.
  local since = turn.state == WAITING and 0 or math.floor((turn.since - turn.rank) / 1000)
  return table.concat({
    integer(turn.rank), turn.state .. integer(since), integer(math.ceil((turn.deadline - turn.rank) / 1000000)),
    integer(turn.rank - turn.published), turn.limit, turn.copies, turn.is_message and '@' or turn.token,
  }, ' ') .. '\31' .. turn.task_id
end

function write_turn(key, ticket, turn)
  turn.value = value_of(turn)
  set_ticket(key, ticket, turn)
end

function set_state(key, ticket, turn, state, since)
  turn.state, turn.since = state, since or now
  turn.value = value_of(turn)
  redis.call('HSET', key, 'q' .. ticket, turn.value)
end

-- A WAITING turn is unheard from now on, so a newcomer yields to it for `ON_ITS_WAY`. A turn that was woken, or is on its
-- way, keeps its `since`: it has had its time.
local function set_unheard(key, ticket, turn)
  set_state(key, ticket, turn, UNHEARD, turn.state == WAITING and now or turn.since)
end

function leave_line(key, ticket, token)
  redis.call('HDEL', key, 'q' .. ticket, 'w' .. token)
end

-- Wake a turn. False if nobody listens, so that others are woken instead; a turn on its way will listen soon. Without the
-- right to publish, assume that somebody listens.
function wake_turn(key, ticket, turn)
  if turn.state == WOKEN then
    return true
  end
  local listeners = redis.pcall('PUBLISH', key .. ':' .. turn.token, 'free')
  if listeners ~= 0 then
    set_state(key, ticket, turn, WOKEN)
    return true
  elseif turn.state == COMING and turn.since > now - ON_ITS_WAY then
    return true
  end
  set_unheard(key, ticket, turn)
  return false
end

-- Visit the turns from a ticket on, in order, until `visit` says `enough`. A turn that is over is removed. A walk reads
-- `LONGEST_WALK` tickets, or twice as many if it begins before the front. Returns three values:
--
--   the first ticket whose turn is not unheard, or the ticket at which the next walk begins
--   the first ticket whose turn is unheard, or nil
--   true if the walk stopped short, because it met unheard turns only, and more follow
function walk_line(key, line, from, last, visit)
  local front, unheard
  local stop = math.min(last, from + (from < line.front and 2 or 1) * LONGEST_WALK - 1)
  for i, value in ipairs(read_numbered(key, 'q', from, stop, '')) do
    local turn, ticket = turn_in(value), from + i - 1
    if turn and turn.deadline <= now then
      leave_line(key, ticket, turn.token)
    elseif turn then
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
        return front or ticket, unheard, false
      end
    end
  end
  return front or math.max(from, stop + 1), unheard, not front and stop < last
end

-- The first ticket before the front that is not known to be void.
local function tidied(key, line)
  local stop = math.min(line.front, line.first + TIDIED_AT_ONCE) - 1
  for i, value in ipairs(read_numbered(key, 'q', line.first, stop, '')) do
    local turn, ticket = turn_in(value), line.first + i - 1
    if turn and turn.deadline > now and line.last - ticket < MOST_TURNS then
      return ticket
    elseif turn then
      leave_line(key, ticket, turn.token)
    end
  end
  return stop + 1
end

-- Let walks begin at a later ticket; `unheard` is the first turn that was left behind. The turns that are near the front
-- from now on have to learn the next deadline.
function begin_line_at(key, line, front, unheard)
  local before, first = line.front, line.first
  front = math.max(front, before)
  if first < before then
    first = tidied(key, line)
  end
  if first == before then
    first = math.min(unheard or front, front)
  end
  local is_moved = first > line.first or front > before
  line.first, line.front = first, front
  if first > line.last then
    redis.call('HDEL', key, 'first', 'last', 'front')
  elseif is_moved then
    set_range(key, line)
  end
  for ticket = math.max(before + NEXT_FEW, front), math.min(front + NEXT_FEW - 1, line.last) do
    local turn = turn_in(redis.call('HGET', key, 'q' .. ticket))
    if turn then
      redis.pcall('PUBLISH', key .. ':' .. turn.token, 'near')
    end
  end
end

-- Wake the turns for which a place is free while `held` are taken. If those are fewer than `least`, tell the next turns that
-- they are near, so that they learn when a place will be free. Returns whether more turns have to be woken. After a
-- release the client has them woken; after another script, the next turn finds the place when it looks.
function wake_next(key, line, held, least)
  local woken = 0
  local front, unheard, stopped_short = walk_line(key, line, line.front, line.last, function(turn, ticket)
    if turn.state == UNHEARD then
      return
    end
    local free = turn.limit - held
    local has_place = woken < (free > 0 and math.max(free, math.min(2 * missed, MOST_WOKEN)) or free)
    if not has_place and woken >= least then
      return 'enough'
    elseif not has_place then
      redis.pcall('PUBLISH', key .. ':' .. turn.token, 'near')
    elseif not wake_turn(key, ticket, turn) then
      return
    end
    woken = woken + places_of(turn.token)
  end)
  begin_line_at(key, line, front, unheard)
  return stopped_short
end

-- The turns between two tickets. A turn that is over leaves, and makes room.
local function turns_between(key, start, stop)
  local turns = {}
  for i, value in ipairs(read_numbered(key, 'q', start, stop, '')) do
    local turn = turn_in(value)
    if turn and turn.deadline <= now then
      leave_line(key, start + i - 1, turn.token)
    else
      turns[start + i - 1] = turn
    end
  end
  return turns
end

-- Whether a newcomer was published later than another turn, or refused more than a moment later.
local function is_later(turn, other)
  return turn.published >= other.published or other.rank <= now - ON_ITS_WAY
end

-- The rank of a newcomer: now, or the moment of turns that it goes before. These were published later, and refused in the
-- same moment.
local function rank_of_newcomer(turns, line, turn)
  local rank = now
  for ticket = line.last, math.max(line.first, line.last - AT_ONE_MOMENT + 1), -1 do
    local other = turns[ticket]
    if other and is_later(turn, other) then
      break
    end
    rank = other and math.min(rank, other.rank) or rank
  end
  return rank
end

-- Put a turn where its rank belongs. Only the ends of the line are searched: new turns are among the last, and turns that
-- come back among the first. The others move up to the next void ticket, or to the end.
local function insert_turn(key, line, turn)
  local is_newcomer, step, ticket = not turn.rank, 1, nil
  local start = math.max(line.first, line.last - (is_newcomer and AT_ONE_MOMENT or LONGEST_WALK) + 1)
  local turns = turns_between(key, start, line.last)
  turn.rank = turn.rank or rank_of_newcomer(turns, line, turn)
  for each = line.last, start, -1 do
    if turns[each] and goes_before(turns[each], turn) then
      ticket = each + 1
      break
    end
  end
  if not ticket and is_newcomer then
    ticket = start
  elseif not ticket then
    local stop = math.min(line.last, line.first + LONGEST_WALK - 1)
    step, turns, ticket = -1, turns_between(key, line.first, stop), stop
    for each = line.first, stop do
      if turns[each] and goes_before(turn, turns[each]) then
        ticket = each - 1
        break
      end
    end
  end
  local void = ticket
  while turns[void] do
    void = void + step
  end
  for each = void, ticket + step, -step do
    set_ticket(key, each, turns[each - step])
  end
  write_turn(key, ticket, turn)
  -- The turn at the front may have moved one ticket before it.
  local front = math.min(ticket, step < 0 and void < line.front and line.front - 1 or line.front)
  line.first, line.last, line.front = math.min(line.first, void), math.max(line.last, void), front
  return ticket
end

-- Keep the turn of a refused message or process, or give it one where its rank belongs. Returns the line, the ticket and
-- the rank, which is nil if there are too many turns.
function keep_turn(key, line, turn, ticket, own)
  if own then
    turn.rank, turn.copies = own.rank, own.copies
    write_turn(key, ticket, turn)
    line.front = math.min(line.front, ticket)
  elseif not line then
    turn.rank, ticket = turn.rank or now, FIRST_TICKET
    line = {first = ticket, last = ticket, front = ticket}
    write_turn(key, ticket, turn)
  else
    if line.last - line.first >= MOST_TURNS and line.first < line.front then
      line.first = tidied(key, line)
    end
    if line.last - line.first >= MOST_TURNS then
      return line
    end
    local latest = turn_in(redis.call('HGET', key, 'q' .. line.last))
    local is_newcomer = not turn.rank
    if latest and (is_newcomer and is_later(turn, latest) or not is_newcomer and goes_before(latest, turn)) then
      turn.rank, ticket, line.last = turn.rank or now, line.last + 1, line.last + 1
      write_turn(key, ticket, turn)
    else
      ticket = insert_turn(key, line, turn)
    end
  end
  set_range(key, line)
  expire_after(key, turn.deadline - now)
  return line, ticket, turn.rank
end

-- Read a lock, with the ticket of one turn, but without its facts and its turns.
function read_lock(key, who)
  local known = redis.call(
    'HMGET', key, 'fence', 'places', 'first', 'last', 'front', 'next', 'queued', 'cooldown', 'w' .. who
  )
  return {
    fence = known[1], places = read_places(key, tonumber(known[2] or 1)), line = line_in(known[3], known[4], known[5]),
    successor = successor_in(known[6]), queued = mark_of(known[7]), cooldown = mark_of(known[8], 'cooldown'),
    ticket = tonumber(known[9]), is_empty = not (known[1] or known[3] or known[6] or known[7] or known[8]),
  }
end
