-- The line of a lock: the turns of those that wait for it, in the order of their ranks.
--   first, last   range of the tickets, as long as there are any
--   front         where walks begin, if not at the first: before it are only turns that are unheard
--   q<ticket>     a turn: its rank's moment; its state, and since when, in milliseconds after the rank; until when it is
--                 kept, in seconds after the rank; microseconds of its publication before the rank; limit; 1 once another
--                 delivery of its message has come, or 0; the token of a process, or `@`; fields of later versions; and
--                 then '\31' and the task id
--   w<who>        its ticket
-- A `Lock`, or a run in its slot, waits under its token. A message that waits in the broker has a turn under `@` and its
-- task id, which outlives the execution that took it. A rank is the moment of the first refusal, then the publication; so
-- that a call which was published earlier goes first of those that are refused in one moment, it takes their moment. The
-- message carries its rank, and gets its place back by it if the store has lost the turn. leases/line.py has the table of
-- the states.
local line_in, turn_in, goes_before, write_turn, set_state, leave_line, call_turn, walk_line, begin_line_at, call_next
local call_in_place_of_missed, is_later, keep_turn
local WAITING, CALLED, COMING, UNHEARD = 'w', 'c', 'o', 'u'
local NEXT_FEW = 3 -- so many look by themselves every few seconds
local LONGEST_WALK = 200 -- so many tickets are read by one script
local MOST_TURNS = 5000
local ON_ITS_WAY = 2000000 -- for so long a message goes from its refusal through the broker to a worker that listens
local TIME_TO_COME = 3000000 -- a message that was called has so long to come
local MOST_CALLED = 16 -- so many are called at once
local AT_ONE_MOMENT = 20 -- so many are looked at for one that was published later, and refused in the same moment
local LONGEST_SEARCH = 100 -- so many tickets are read at each end of the line for the place of a rank
local TIDIED_AT_ONCE = 20
local FIRST_TICKET = 1000 -- calls that come back go before it, below zero if need be

-- Turns that this script finds unheard because their messages were called and have not come. Their worker has no free
-- process, or is paused, and the turns behind them may be its own as well: twice as many are called in their place, and
-- whoever comes first is granted.
local missed = 0

local function in_place_of_missed()
  return math.min(2 * missed, MOST_CALLED)
end

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

-- A turn that somebody listened for is missed from now on. One that was called, or on its way, has had its time.
local function set_unheard(key, ticket, turn)
  set_state(key, ticket, turn, UNHEARD, turn.state == WAITING and now or turn.since)
end

function leave_line(key, ticket, token)
  redis.call('HDEL', key, 'q' .. ticket, 'w' .. token)
end

-- Call who has this turn; false if nobody listens, so that others are called in its place. One on its way listens soon.
-- If we may use no channel, it is not known whether anybody listens.
function call_turn(key, ticket, turn)
  if turn.state == CALLED then
    return true
  end
  local listeners = redis.pcall('PUBLISH', key .. ':' .. turn.token, 'free')
  if listeners ~= 0 then
    set_state(key, ticket, turn, CALLED)
    return true
  elseif turn.state == COMING and turn.since > now - ON_ITS_WAY then
    return true
  end
  set_unheard(key, ticket, turn)
  return false
end

-- Visit the turns from a ticket on, in order, until `visit` says `enough`. Those whose deadline is over are removed, so
-- each is paid for once. The walk gives up after a number of tickets, of which as many are behind the front. Returns the
-- first ticket of a turn that is not unheard, or else the one at which to go on; the first of an unheard turn; and whether
-- the walk gave up before it met a turn that is not unheard, so that somebody has to go on.
function walk_line(key, line, from, last, visit)
  local front, unheard
  local stop = math.min(last, from + (from < line.front and 2 or 1) * LONGEST_WALK - 1)
  for i, value in ipairs(read_numbered(key, 'q', from, stop, '')) do
    local turn, ticket = turn_in(value), from + i - 1
    if turn and turn.deadline <= now then
      leave_line(key, ticket, turn.token)
    elseif turn then
      if turn.state == CALLED and turn.since <= now - TIME_TO_COME then
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

-- The first ticket that is not known to be void, of those before the front.
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

-- Walks begin at a later ticket now; `unheard` is the first turn that was left behind. Those that are near the front now
-- have to learn the next deadline.
function begin_line_at(key, line, front, unheard)
  local before, first = line.front, line.first
  front = math.max(front, before)
  if first < before then
    first = tidied(key, line)
  end
  if first == before then
    first = math.min(unheard or front, front)
  end
  if first > line.last then
    redis.call('HDEL', key, 'first', 'last', 'front')
  elseif first > line.first or front > before then
    redis.call('HSET', key, 'first', first)
    if front > first then
      redis.call('HSET', key, 'front', front)
    else
      redis.call('HDEL', key, 'front')
    end
  end
  line.first, line.front = first, front
  for ticket = math.max(before + NEXT_FEW, front), math.min(front + NEXT_FEW - 1, line.last) do
    local turn = turn_in(redis.call('HGET', key, 'q' .. ticket))
    if turn then
      redis.pcall('PUBLISH', key .. ':' .. turn.token, 'near')
    end
  end
end

-- Call those whose turn it is, while so many places are held; and at least so many, to learn when a place will be free.
-- Returns whether somebody has to go on.
function call_next(key, line, held, least)
  local called = 0
  local front, unheard, stopped_short = walk_line(key, line, line.front, line.last, function(turn, ticket)
    if turn.state == UNHEARD then
      return
    end
    local free = turn.limit - held
    local has_place = called < (free > 0 and math.max(free, in_place_of_missed()) or free)
    if not has_place and called >= least then
      return 'enough'
    elseif not has_place then
      redis.pcall('PUBLISH', key .. ':' .. turn.token, 'near')
    elseif not call_turn(key, ticket, turn) then
      return
    end
    called = called + places_of(turn.token)
  end)
  begin_line_at(key, line, front, unheard)
  return stopped_short
end

function call_in_place_of_missed(key, line)
  local called = 0
  walk_line(key, line, line.front, line.last, function(turn, ticket)
    if called >= in_place_of_missed() then
      return 'enough'
    end
    called = called + (turn.state ~= UNHEARD and call_turn(key, ticket, turn) and 1 or 0)
  end)
end

-- The turns in a part of the line; a turn that is over leaves, and makes room.
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

-- A call that was not refused before was published later, or refused later by more than a moment.
function is_later(turn, other)
  return turn.published >= other.published or other.rank <= now - ON_ITS_WAY
end

-- A rank for a call that was not refused before: now, or the moment of those that were published later, and refused in
-- the same moment, which it goes before.
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

-- Put a turn where its rank belongs. New turns are the last, and those that come back are among the first, so the place is
-- near an end of the line: it is searched only there, and others move up to the next void ticket, or to the end.
local function insert_turn(key, line, turn)
  local is_newcomer, step, ticket = not turn.rank, 1, nil
  local start = math.max(line.first, line.last - (is_newcomer and AT_ONE_MOMENT or LONGEST_SEARCH) + 1)
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
    local stop = math.min(line.last, line.first + LONGEST_SEARCH - 1)
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
  -- Whoever was at the front may be one ticket before it now.
  local front = math.min(ticket, step < 0 and void < line.front and line.front - 1 or line.front)
  line.first, line.last, line.front = math.min(line.first, void), math.max(line.last, void), front
  return ticket
end

-- The turn of a message, or of a process, that is refused: the one that it has, or else one where its rank belongs.
-- Returns the line, its ticket and its rank; the rank is nil if there are too many turns.
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
  redis.call('HSET', key, 'first', line.first, 'last', line.last)
  if line.front > line.first then
    redis.call('HSET', key, 'front', line.front)
  else
    redis.call('HDEL', key, 'front')
  end
  expire_after(key, turn.deadline - now)
  return line, ticket, turn.rank
end
