-- Take a place of a lock, or a turn in its line, or learn who holds it.
--
-- The parts describe the hash of a lock. Times are microseconds by this server's clock. A caller whose reply was lost may ask
-- again: the same token renews its grant, or keeps its turn.
--
-- KEYS[1]  lock key
-- @argument token
-- @argument grant     ttl in milliseconds, pid, attempt, publication, words: see `<place>:` in parts/lock.lua
-- @argument words     fields of a `Claim`, durations in milliseconds. `message`: search for another delivery of the message.
--                     `looks`: take a turn for the message, but no place.
-- @argument task_id   empty for a `Lock`
-- @argument hostname
-- @argument named     see `<place>:n` in parts/lock.lua
--
-- Returns  fence                                          Place 1 was granted, in a lock without fields.
--          {'granted', now, place, fence, since, died}    `died`: task id, hostname, name of the holder that died there
--          {'done', now, attempt, outcome}                A run of this message has ended.
--          {'looked', now, comes, near, free_in}          `comes`: 1 if the message has to ask for the lock
--          {'walked', now}                                Many turns are unheard: ask again.
--          {'held', now, next, rows}                      `next`: task id of the successor, or empty
--                                                         `rows`: holders, or else calls that go before
--          {'held', now, next, rows, rank, near, free_in} The caller has a turn.
--                                                         `near`: 1 if the turn looks again in a few seconds
--                                                         `free_in`: microseconds until a place is free if nobody renews
--          {'twin', now, '', rows}                        Another delivery of the message holds the lock, or waits.

-- @include time
local key, ttl = KEYS[1], string.match(grant, '^%d+')
local size = call('HLEN', key)
if size == 0 and (words == 'limit=1' or string.find(words, '^limit=[1-9]')) then
  local fence = format('%d', now)
  -- A single write first: a server out of memory refuses all of the grant, or nothing.
  call(
    'HSET', key, '1', token, token, format('%d', now + ttl * 1000), 'fence', fence,
    '1:', fence .. ' 0 ' .. grant, '1:i', task_id, '1:h', hostname
  )
  if named then
    call('HSET', key, '1:n', named)
  end
  call('PEXPIRE', key, format('%d', 2 * ttl))
  return now
elseif size == 6 and words == 'limit=1' then
  -- The usual refusal, in a third of the time: the fields still have the order of the write above.
  local known = call('HGETALL', key)
  local holder = known[2]
  local is_usual = known[1] == '1' and known[3] == holder and known[5] == 'fence' and known[7] == '1:'
    and known[9] == '1:i' and known[11] == '1:h'
  if is_usual and holder ~= token and known[4] - now > 0 then
    return {'held', now, '', {1, holder, known[4], known[8], known[10], known[12], ''}}
  end
end

-- @include lock
-- @include marks
-- @include successor
-- @include queue
local PATIENCE = 30000000 -- after that, no free place is kept for the successor, whose message may be lost
local FIRST_TICKET = 1000 -- a call that comes back may get a smaller ticket, even below zero

ttl = tonumber(ttl)
local words = words_in(words)
local limit, looks, policy, is_here = tonumber(words.limit), words.looks, words.succeeds, words.waits_here
local attempt, published = string.match(grant, '^%d+ %S+ (%d+) (%d+)')
attempt = tonumber(attempt)
local own_turn = is_here and token or '@' .. task_id
local lock = read_lock(key, own_turn)
local places, line, queued, successor = lock.places, lock.line, lock.queued, lock.successor
local ticket = line and lock.ticket
local this_call = {
  task_id = task_id, task_name = string.match(named or '', '^[^\31]*'), policy = policy, newest = words.newest,
  published = published ~= '0' and tonumber(published) or now, rank = math.min(tonumber(words.rank or 0), now),
  token = own_turn,
}
local is_newcomer = not ticket and this_call.rank == 0
local place

-- A deploy may have given the task a policy without turns: the call's old turn would then stay in the line.
local function end_turn_of_former_policy()
  if ticket and not words.turn_for then
    leave_line(key, ticket, own_turn)
  end
end

-- 1. Is another delivery of this message running or done? Every caller reads the marker, because some brokers mark no
-- redelivery. A later attempt takes the place in which an earlier one has left a cool-down.
local message = words.message or published ~= '0' and published
if message then
  local marker = 'done:' .. task_id .. ':' .. message
  local past, outcome, at = read_marker(key, marker)
  if attempt <= past and (outcome ~= 'ended' or now - at < RESULT_GRACE) then
    if outcome ~= 'ended' then
      keep_marker(key, marker)
    end
    return {'done', now, past, outcome}
  end
end
if words.message then
  local twin
  for _, each in ipairs(places) do
    if each.alive and each.token ~= token and call('HGET', key, each.place .. ':i') == task_id then
      local is_later = attempt > grant_of(key, each.place).attempt
      if is_on_hold(each.token) then
        each.alive, place = not is_later, is_later and each.place or place
      else
        if not is_later then
          redis.pcall('HSET', key, each.place .. ':c', 1)
        end
        twin = described(key, {each})
        break
      end
    end
  end
  if line and not twin then
    walk_line(key, line, not is_here and ticket or line.front, line.last, function(turn, its_ticket)
      if turn.task_id == task_id and turn.token ~= token then
        turn.copies = '1'
        pcall(write_turn, key, its_ticket, turn)
        -- A message's turn is no twin: its deliveries share the turn.
        twin = not turn.is_message and described_calls({turn}) or nil
        return 'enough'
      end
    end)
  end
  if twin then
    return {'twin', now, '', twin}
  end
end

-- 2. Does the token have a place already?
local held, soonest = 0, now + ttl * 1000
for _, each in ipairs(places) do
  if each.token == token then
    local its_grant = grant_of(key, each.place)
    -- PEXPIRE first, as in `begin_writing`: a server out of memory would refuse HSET.
    expire_after(key, 2000 * ttl)
    set_deadline(key, each, now + ttl * 1000)
    return {'granted', now, each.place, its_grant.fence, its_grant.since}
  elseif each.alive then
    held, soonest = held + places_of(each.token), math.min(soonest, each.deadline)
  else
    place = place or each.place
  end
end

-- 3. Is the call superseded by a newer call?
local its_relation, heeds = relation(this_call, successor), words.heeds_queued
local newer = newer_call(this_call, heeds and queued, successor)
if newer then
  end_turn_of_former_policy()
  return {'held', now, newer.task_id, described(key, places) or described_calls({newer})}
end

-- 4. Do the calls that go before take all free places?
local free, before = limit - held, {}
local function ranks_before(each)
  before[#before + 1] = each
  if each.token and places_of(each.token) > 1 then
    -- A call ahead takes the whole lock: the caller gets no place.
    free = math.min(free, #before)
  end
  if free > 0 then
    local bound = each.state == WOKEN and TIME_TO_COME or ON_ITS_WAY
    soonest = math.min(soonest, each.since and each.state ~= WAITING and each.since + bound or each.deadline)
  end
  return #before >= free and 'enough'
end

-- A caller that waits in its slot yields to no message, because the slot may be the only one. A successor yields to queued
-- calls and turns, so these do not yield to it: otherwise all would wait. A call yields to no successor that it displaces:
-- otherwise, if calls come often, none would run.
local is_queued = queued and queued.task_id == task_id
if its_relation == 'stranger' and not (is_queued or is_here or ticket) then
  ranks_before(successor)
end
if queued and not is_queued and heeds then
  ranks_before(queued)
end
-- Wake the turns that go before, because a holder that died has woken none. A newcomer that may wait yields to unheard turns
-- whose messages may be on their way.
local yields = is_newcomer and words.turn_for
local from = line and (yields and math.max(line.first, line.front - LONGEST_WALK) or line.front)
local behind = line and (ticket and ticket - 1 or line.last)
if line and free > #before and behind >= from then
  local stopped_short = walk_line(key, line, from, behind, function(turn, its_ticket)
    if turn.is_message and is_queued then
      -- The run of that message would yield to this queued call.
      return
    elseif not (ticket or is_newcomer) and goes_before(this_call, turn) then
      return 'enough'
    end
    local is_there = turn.state ~= UNHEARD and wake_turn(key, its_ticket, turn)
    local may_come = yields and turn.state == UNHEARD and turn.since > now - ON_ITS_WAY
    return (is_there or may_come) and ranks_before(turn)
  end)
  if stopped_short and free > #before then
    return looks and {'looked', now, 0, 1, 0} or {'walked', now}
  end
  -- Woken turns did not come: wake others unless the caller takes a place.
  if line.missed > 0 and (looks or free <= #before) then
    wake_next(key, line, held)
  end
end

local own = ticket and read_turn(key, ticket)
local copies = own and own.copies or '0'

-- While the first turn is woken, all turns are near: they look soon, as the first may never come.
local function nearness()
  local in_front = line and read_turn(key, line.front)
  local is_far = ticket and in_front and in_front.state ~= WOKEN and ticket - line.front >= NEXT_FEW
  return is_far and 0 or 1
end

if looks and (free > #before or this_call.rank > 0 or not words.turn_for) then
  local is_next = its_relation == 'mine' and is_coming(successor)
  begin_writing(key)
  if is_next then
    successor.deadline = now + PATIENCE
    set_successor(key, successor)
    if policy == 'replace' then
      ask_oldest_to_stop(key, places, task_id)
    end
  end
  local comes = free > #before or not (ticket or is_next)
  if own then
    own.state, own.since = comes and WOKEN or WAITING, now
    write_heard(key, line, ticket, own)
  end
  return {'looked', now, comes and 1 or 0, nearness(), math.max(0, soonest - now)}
end

-- 5. Is a place left for the caller?
if free > #before then
  place = place or #places + 1
  local fence = math.max(tonumber(lock.fence or 0) + 1, now)
  local dead_token = places[place] and places[place].token
  local died
  if dead_token then
    died = not is_on_hold(dead_token) and call('HMGET', key, place .. ':i', place .. ':h', place .. ':n') or nil
    empty_place(key, place, dead_token)
  end
  call(
    'HSET', key, place, token, token, integer(now + ttl * 1000), 'fence', integer(fence),
    place .. ':', integer(now) .. ' ' .. integer(fence - now) .. ' ' .. grant,
    place .. ':i', task_id, place .. ':h', hostname
  )
  if named then
    call('HSET', key, place .. ':n', named)
  end
  if place > #places then
    call('HSET', key, 'places', place)
  end
  -- Remember the caller, because older calls that it has superseded may still come.
  local older_until = policy and is_queued and queued.supersedes or 0
  if its_relation == 'mine' or its_relation == 'older_yields' or older_until > 0 then
    local heir = its_relation == 'mine' and successor or this_call
    heir.deadline = 0
    heir.supersedes = math.max(older_until, heir.supersedes or now + words.supersedes_for * 1000)
    if heir.supersedes > now then
      set_successor(key, heir)
    else
      call('HDEL', key, 'next')
    end
    let_holders_stay(key, places)
  end
  if is_queued then
    call('HDEL', key, 'queued')
  end
  if ticket then
    if copies == '1' then
      call('HSET', key, place .. ':c', 1)
    end
    leave_line(key, ticket, own_turn)
  end
  if line then
    wake_next(key, line, held + places_of(token))
  end
  expire_after(key, 2000 * ttl)
  return {'granted', now, place, fence, now, died}
end

-- The queued call stays queued while it waits.
local queued_until = words.queued_for and now + words.queued_for * 1000
if queued_until and is_queued and queued.deadline < queued_until then
  redis.pcall('HSET', key, 'queued', integer(queued_until) .. string.match(queued.value, ' .*$'))
  expire_after(key, queued_until - now)
end

-- 6. Which call runs next? A `replace` call ends in favour of a run that was published later. So does a `rerun` call that has
-- come again, if no successor is coming. Otherwise the call becomes the successor, but no `rerun` call displaces a stranger. A
-- holder is asked to stop once its successor was requeued: until then, the successor's message may be lost.
local next_one
local has_come_again = words.newest == 'next'
if policy == 'replace' or policy and has_come_again and not is_coming(successor) then
  next_one = newer_run(key, places, this_call)
end
if policy and not next_one and not (policy == 'rerun' and its_relation == 'stranger') then
  local remembers = its_relation == 'older_yields' or its_relation == 'predecessor'
  this_call.deadline = now + PATIENCE
  this_call.supersedes = remembers and now + words.supersedes_for * 1000 or its_relation == 'mine' and successor.supersedes or 0
  begin_writing(key)
  if its_relation ~= 'mine' then
    wake_successor(key, successor)
  end
  set_successor(key, this_call)
  if policy == 'replace' and has_come_again then
    ask_oldest_to_stop(key, places, task_id)
  end
  next_one = task_id
end
local rows = described(key, places) or described_calls(before)

-- 7. Does the caller get a turn?
if not words.turn_for then
  end_turn_of_former_policy()
  return {'held', now, next_one or '', rows}
end
local turn = {
  state = (is_here or looks) and WAITING or COMING, since = now, deadline = now + words.turn_for * 1000, token = own_turn,
  limit = limit, copies = copies, task_id = task_id, published = this_call.published, is_message = not is_here,
  rank = own and own.rank or not is_newcomer and this_call.rank or nil,
}

-- A newcomer passes turns that were published later, but only those that were refused a moment ago.
local function passes(other)
  if turn.rank then
    return goes_before(turn, other)
  end
  return turn.published < other.published and other.rank > now - ON_ITS_WAY
end

-- Returns the turn's ticket, the turns that move, and whether the search met one that stays.
local function position_from(each, step)
  local moved, stop = {}, each + LONGEST_WALK * step
  while each ~= stop and each >= line.first and each <= line.last do
    local other = turn_at(key, each)
    if other and passes(other) == (step > 0) then
      return each - step, moved, true
    end
    moved[each] = other
    each = each + step
  end
  return each - step, moved, false
end

line = line or {first = FIRST_TICKET, last = FIRST_TICKET - 1, front = FIRST_TICKET}
if not own and line.last - line.first >= MOST_TURNS then
  line.first = tidied(key, line)
  if line.last - line.first >= MOST_TURNS then
    return {'held', now, next_one or '', rows}
  end
end
begin_writing(key)
if not own then
  -- A new turn belongs near the last ticket; a turn that comes back, mostly near the first.
  local step = 1
  local moved, is_found
  ticket, moved, is_found = position_from(line.last, -1)
  if turn.rank and not is_found then
    step, ticket, moved = -1, position_from(line.first, 1)
  end
  local void = ticket
  while moved[void] do
    void = void + step
  end
  for each = void - step, ticket, -step do
    call('HSET', key, 'q' .. each + step, moved[each].value, 'w' .. moved[each].token, each + step)
  end
  local rank = now
  for _, other in pairs(moved) do
    rank = math.min(rank, other.rank)
  end
  turn.rank = turn.rank or rank
  -- The turn at the front may have moved.
  line.front = void < line.front and line.front - 1 or line.front
  line.first, line.last = math.min(line.first, void), math.max(line.last, void)
end
write_heard(key, line, ticket, turn)
expire_after(key, turn.deadline - now)
return {'held', now, next_one or '', rows, turn.rank, nearness(), math.max(0, soonest - now)}
