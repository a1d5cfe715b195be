-- Take a place of a lock, or a turn in its line.
--
-- @argument token
-- @argument grant           `<place>:` without its first two numbers, see parts/lock.lua
-- @argument words           fields of a `Claim`; durations in milliseconds
--                           `message`: only if the message may be a copy
--                           `looks`: see `Store.look`
-- @argument task_id         empty for a `Lock`
-- @argument hostname
-- @argument name_and_label  see `<place>:n` in parts/lock.lua
--
-- Returns  fence                                           granted place 1; the fence is also `now`
--          {'granted', now, place, fence, since, died}     `died`: task id, hostname, `<place>:n` of a holder that died there
--          {'done', now, attempt, outcome}                 this message has run
--          {'twin', now, '', rows}                         another delivery of this message, in `rows`, runs or waits
--          {'looked', now, comes, near, free_in}           `comes`: 1 if the message must go to the pool
--          {'walked', now}                                 too many UNHEARD turns for one script; repeat it
--          {'held', now, next, rows}                       the caller is refused
--          {'held', now, next, rows, rank, near, free_in}  the caller is refused, and has a turn
--   next     the caller's task id if it runs next; the task id of a newer call if the caller ends for that call; or empty
--   rows     holders, or else calls that go before the caller
--   near     1 if the turn must poll every few seconds
--   free_in  microseconds until a place is free if nobody renews

-- @include time
local key, ttl = KEYS[1], string.match(grant, '^%d+')
local size = call('HLEN', key)
-- Only words that begin with a limit above 0 may take a place: the words of a look begin with `looks`.
if size == 0 and string.find(words, '^limit=[1-9]') then
  local fence = format('%d', now)
  -- This HSET comes first: a server out of memory refuses it, and the grant leaves nothing.
  call(
    'HSET', key, '1', token, token, format('%d', now + ttl * 1000), 'fence', fence,
    '1:', fence .. ' 0 ' .. grant, '1:i', task_id, '1:h', hostname
  )
  if name_and_label then
    call('HSET', key, '1:n', name_and_label)
  end
  call('PEXPIRE', key, format('%d', 2 * ttl))
  return now
elseif size == 6 and words == 'limit=1' then
  -- The usual refusal, without the parts below. A small hash keeps its fields in the order of the write above.
  local known = call('HGETALL', key)
  local holder, deadline = known[2], known[4]
  local is_usual = known[1] == '1' and known[3] == holder and known[5] == 'fence' and known[7] == '1:'
    and known[9] == '1:i' and known[11] == '1:h'
  if is_usual and holder ~= token and deadline - now > 0 then
    return {'held', now, '', {1, holder, deadline, known[8], known[10], known[12], ''}}
  end
end

-- @include lock
-- @include marks
-- @include successor
-- @include queue
local PATIENCE = 30000000 -- microseconds until a successor's message counts as lost
local FIRST_TICKET = 1000 -- of a new line; a turn that comes back may get a smaller ticket, even below 0

ttl = tonumber(ttl)
local claim = parsed(words)
local limit, policy = tonumber(claim.limit), claim.succeeds
local attempt, published = string.match(grant, '^%d+ %S+ (%d+) (%d+)')
attempt = tonumber(attempt)
local who = claim.waits_here and token or '@' .. task_id
local lock = read_lock(key, who)
local places, line, queued, successor = lock.places, lock.line, lock.queued, lock.successor
local ticket = line and lock.ticket
local caller = {
  task_id = task_id, task_name = string.match(name_and_label or '', '^[^\31]*'), policy = policy, newest = claim.newest,
  published = published ~= '0' and tonumber(published) or now, rank = math.min(tonumber(claim.rank or 0), now),
}
local is_newcomer = not ticket and caller.rank == 0 -- has never had a turn
local free_place

-- After a deploy, the task may have a policy without turns, and the call's old turn would stay in the line.
local function end_turn_of_former_policy()
  if ticket and not claim.turn_for then
    leave_line(key, ticket, who)
  end
end

-- 1. Is another delivery running or done? Some brokers mark no redelivery, so every caller reads the done marker.
local publication = claim.message or published ~= '0' and published
if publication then
  local marker = 'done:' .. task_id .. ':' .. publication
  local done_attempt, outcome, written_at = read_marker(key, marker)
  if attempt <= done_attempt and (outcome ~= 'ended' or now - written_at < RESULT_GRACE) then
    -- `keep_marker` would restart the grace of an `ended` marker, so copies of a dead run would never run.
    if outcome ~= 'ended' then
      keep_marker(key, marker)
    end
    return {'done', now, done_attempt, outcome}
  end
end
if claim.message then
  for _, place in ipairs(places) do
    if place.is_taken and place.token ~= token and call('HGET', key, place.number .. ':i') == task_id then
      local is_later = attempt > grant_of(key, place.number).attempt
      if not is_cooldown(place.token) then
        if not is_later then
          -- Answer the copy even if the server refuses writes.
          redis.pcall('HSET', key, place.number .. ':c', 1)
        end
        return {'twin', now, '', rows_of_holders(key, {place})}
      elseif is_later then
        -- A later attempt does not wait for the cool-down of an earlier one.
        place.is_taken, free_place = false, place.number
      end
    end
  end
  local twin
  if line then
    walk_line(key, line, not claim.waits_here and ticket or line.front, line.last, function(turn, its_ticket)
      if turn.task_id == task_id and turn.who ~= token then
        turn.has_copy = '1'
        pcall(write_turn, key, its_ticket, turn)
        -- All deliveries of a message share its turn, so that turn is no twin.
        twin = not turn.is_message and turn
        return 'enough'
      end
    end)
  end
  if twin then
    return {'twin', now, '', rows_of_calls({twin})}
  end
end

-- 2. Does the token have a place already, because the reply to its grant was lost?
local taken, free_at = 0, now + ttl * 1000
for _, place in ipairs(places) do
  if place.token == token then
    local its_grant = grant_of(key, place.number)
    -- PEXPIRE comes first; otherwise a server out of memory would refuse HSET.
    keep_at_least(key, 2000 * ttl)
    set_deadline(key, place, now + ttl * 1000)
    return {'granted', now, place.number, its_grant.fence, its_grant.since}
  elseif place.is_taken then
    taken, free_at = taken + places_taken_by(place.token), math.min(free_at, place.deadline)
  else
    free_place = free_place or place.number
  end
end

-- 3. Is the caller superseded by a newer call?
local relation = relation_to_successor(caller, successor)
local newer = newer_call(caller, claim.heeds_queued and queued, successor)
if newer then
  end_turn_of_former_policy()
  return {'held', now, newer.task_id, rows_of_holders(key, places) or rows_of_calls({newer})}
end

-- 4. Do the calls that go before the caller take all free places?
local free, calls_before = limit - taken, {}
local function yield_to(other)
  calls_before[#calls_before + 1] = other
  if other.who and places_taken_by(other.who) > 1 then
    -- `other` wants the whole lock, so no place is left for the caller.
    free = math.min(free, #calls_before)
  end
  if free > 0 then
    local bound = other.state == WOKEN and TIME_TO_COME or ON_ITS_WAY
    free_at = math.min(free_at, other.since and other.state ~= WAITING and other.since + bound or other.deadline)
  end
  return #calls_before >= free and 'enough'
end

-- The caller does not yield to an older successor of its kind, which ends for it.
-- Otherwise frequent calls would displace each other, and none would run.
-- The caller does not yield to a stranger that may wait for the caller's mark, turn or pool slot: neither would run.
local is_queued = queued and queued.task_id == task_id
if relation == 'stranger' and not (is_queued or claim.waits_here or ticket) then
  yield_to(successor)
end
if queued and not is_queued and claim.heeds_queued then
  yield_to(queued)
end
-- Wake the turns before the caller, because a holder that died has woken none.
local heeds_unheard = is_newcomer and claim.turn_for
local from = line and (heeds_unheard and math.max(line.first, line.front - LONGEST_WALK) or line.front)
local last_before = line and (ticket and ticket - 1 or line.last)
if line and free > #calls_before and last_before >= from then
  local stopped_short = walk_line(key, line, from, last_before, function(turn, its_ticket)
    if turn.is_message and is_queued then
      -- That message would yield to the caller, which is queued.
      return
    elseif not (ticket or is_newcomer) and goes_before(caller, turn) then
      return 'enough'
    end
    local is_there = turn.state ~= UNHEARD and wake_turn(key, its_ticket, turn)
    local may_come = heeds_unheard and turn.state == UNHEARD and turn.since > now - ON_ITS_WAY
    return (is_there or may_come) and yield_to(turn)
  end)
  if stopped_short and free > #calls_before then
    return claim.looks and {'looked', now, 0, 1, 0} or {'walked', now}
  end
  -- Wake others instead of the missed turns, unless the caller takes the place.
  if line.missed > 0 and (claim.looks or free <= #calls_before) then
    wake_next(key, line, taken)
  end
end

local own = ticket and read_turn(key, ticket)
local has_copy = own and own.has_copy or '0'

-- All turns poll while the first is woken, because it may never come.
local function nearness()
  local in_front = line and read_turn(key, line.front)
  local is_far = ticket and in_front and in_front.state ~= WOKEN and ticket - line.front >= NEXT_FEW
  return is_far and 0 or 1
end

-- 5. Does the caller only look? A newcomer without a place is refused below, and takes a turn.
if claim.looks and (free > #calls_before or caller.rank > 0 or not claim.turn_for) then
  local is_next = relation == 'mine' and is_coming(successor)
  begin_writing(key)
  if is_next then
    successor.deadline = now + PATIENCE
    set_successor(key, successor)
    if policy == 'replace' then
      ask_oldest_to_stop(key, places, task_id)
    end
  end
  local comes = free > #calls_before or not (ticket or is_next)
  if own then
    own.state, own.since = comes and WOKEN or WAITING, now
    write_heard(key, line, ticket, own)
  end
  return {'looked', now, comes and 1 or 0, nearness(), math.max(0, free_at - now)}
end

-- 6. Is a place left for the caller?
if free > #calls_before then
  local number = free_place or #places + 1
  local fence = math.max(tonumber(lock.fence or 0) + 1, now)
  local former = places[number] and places[number].token
  local died
  if former then
    died = not is_cooldown(former) and call('HMGET', key, number .. ':i', number .. ':h', number .. ':n') or nil
    empty_place(key, number, former)
  end
  call(
    'HSET', key, number, token, token, integer(now + ttl * 1000), 'fence', integer(fence),
    number .. ':', integer(now) .. ' ' .. integer(fence - now) .. ' ' .. grant,
    number .. ':i', task_id, number .. ':h', hostname
  )
  if name_and_label then
    call('HSET', key, number .. ':n', name_and_label)
  end
  if number > #places then
    call('HSET', key, 'places', number)
  end
  -- Remember the caller, because older calls that it has superseded may still come.
  local older_until = policy and is_queued and queued.supersedes_until or 0
  if relation == 'mine' or relation == 'older_yields' or older_until > 0 then
    local begun = relation == 'mine' and successor or caller
    begun.deadline = 0
    begun.supersedes_until = math.max(older_until, begun.supersedes_until or now + claim.supersedes_for * 1000)
    if begun.supersedes_until > now then
      set_successor(key, begun)
    else
      call('HDEL', key, 'next')
    end
    withdraw_successors_request(key, places)
  end
  if is_queued then
    call('HDEL', key, 'queued')
  end
  if ticket then
    if has_copy == '1' then
      call('HSET', key, number .. ':c', 1)
    end
    leave_line(key, ticket, who)
  end
  if line then
    wake_next(key, line, taken + places_taken_by(token))
  end
  keep_at_least(key, 2000 * ttl)
  return {'granted', now, number, fence, now, died}
end

-- From here on, the caller is refused. A queued call stays queued.
local queued_until = claim.queued_for and now + claim.queued_for * 1000
if queued_until and is_queued and queued.deadline < queued_until then
  redis.pcall('HSET', key, 'queued', integer(queued_until) .. string.match(queued.value, ' .*$'))
  keep_at_least(key, queued_until - now)
end

-- 7. Does the caller become the successor, or end because a newer call runs already?
local next_id
local was_requeued = claim.newest == 'next'
if policy == 'replace' or policy and was_requeued and not is_coming(successor) then
  next_id = newer_run(key, places, caller)
end
if policy and not next_id and not (policy == 'rerun' and relation == 'stranger') then
  local inherits = relation == 'older_yields' or relation == 'predecessor'
  caller.deadline = now + PATIENCE
  caller.supersedes_until =
    inherits and now + claim.supersedes_for * 1000 or relation == 'mine' and successor.supersedes_until or 0
  begin_writing(key)
  if relation ~= 'mine' then
    wake_successor(key, successor)
  end
  set_successor(key, caller)
  -- Ask only after the caller was requeued. Before that, the caller's message may be lost.
  -- The holder would then stop for nothing.
  if policy == 'replace' and was_requeued then
    ask_oldest_to_stop(key, places, task_id)
  end
  next_id = task_id
end
local refusal = {'held', now, next_id or '', rows_of_holders(key, places) or rows_of_calls(calls_before)}

-- 8. Does the caller get a turn?
if not claim.turn_for then
  end_turn_of_former_policy()
  return refusal
end
line = line or {first = FIRST_TICKET, last = FIRST_TICKET - 1, front = FIRST_TICKET}
if not own and line.last - line.first >= MOST_TURNS then
  line.first = first_in_use(key, line)
  if line.last - line.first >= MOST_TURNS then
    return refusal
  end
end
local turn = {
  state = (claim.waits_here or claim.looks) and WAITING or COMING, since = now, deadline = now + claim.turn_for * 1000,
  who = who, limit = limit, has_copy = has_copy, task_id = task_id, published = caller.published,
  is_message = not claim.waits_here, rank = own and own.rank or not is_newcomer and caller.rank or nil,
}

-- Calls of one burst ask in any order, so a newcomer overtakes turns that were published later.
-- Only recent turns: otherwise a retry, which keeps its first publication, would overtake the whole line.
local function overtakes(other)
  if turn.rank then
    return goes_before(turn, other)
  end
  return turn.published < other.published and other.rank > now - ON_ITS_WAY
end

-- Finds the caller's ticket, on a walk from the ticket `at`:
--   step -1  towards the front, to a turn that the caller does not overtake; the caller belongs right behind that turn
--   step 1   towards the end, to a turn that the caller overtakes; the caller belongs right before that turn
-- Returns the caller's ticket, the turns that the walk has passed, and whether the walk has met such a turn.
local function search_from(at, step)
  local on_the_way, stop = {}, at + LONGEST_WALK * step
  while at ~= stop and at >= line.first and at <= line.last do
    local other = turn_in_time(key, at)
    if other and overtakes(other) == (step > 0) then
      return at - step, on_the_way, true
    end
    on_the_way[at] = other
    at = at + step
  end
  return at - step, on_the_way, false
end

begin_writing(key)
if not own then
  -- A newcomer belongs near the end. A turn that comes back usually belongs near the front.
  local shift = 1
  local on_the_way, is_found
  ticket, on_the_way, is_found = search_from(line.last, -1)
  if turn.rank and not is_found then
    shift, ticket, on_the_way = -1, search_from(line.first, 1)
  end
  -- Free `ticket` for the caller: move the turns by one, from `ticket` to `void`, the nearest ticket without a turn.
  local void = ticket
  while on_the_way[void] do
    void = void + shift
  end
  for at = void - shift, ticket, -shift do
    call('HSET', key, 'q' .. at + shift, on_the_way[at].value, 'w' .. on_the_way[at].who, at + shift)
  end
  -- A newcomer takes the rank of the first turn that it overtakes, so the ranks stay in order.
  local rank = now
  for _, other in pairs(on_the_way) do
    rank = math.min(rank, other.rank)
  end
  turn.rank = turn.rank or rank
  -- The turn at the front may have moved.
  line.front = void < line.front and line.front - 1 or line.front
  line.first, line.last = math.min(line.first, void), math.max(line.last, void)
end
write_heard(key, line, ticket, turn)
keep_at_least(key, turn.deadline - now)
return {'held', now, next_id or '', refusal[4], turn.rank, nearness(), math.max(0, free_at - now)}
