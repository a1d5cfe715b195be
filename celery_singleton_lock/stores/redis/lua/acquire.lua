-- Take a place at the lock, or a turn in its queue, or say who holds it.
--
-- The lock is one hash; parts/{places,marks,merged,queue}.lua say what is in it. Times are microseconds by this
-- server's clock. A free place belongs to the successor, then to the waiter whose turn it is. To ask again with the
-- same token renews a grant and keeps a turn, so a caller whose reply was lost may simply repeat itself.
--
-- KEYS[1]  lock key
-- KEYS[2]  done marker of the message, if this may be a copy of one that was delivered before
-- ARGV[1]  token, fresh for each execution
-- ARGV[2]  ttl in milliseconds
-- ARGV[3]  limit: a place is granted while fewer are held; then words: `waits` takes a turn; `heeds` a queued mark;
--          `asked` before to be the successor; `crowds` will come again, for the first time; `returns` has come again;
--          `joins` waits for the holder's result; `queued=<milliseconds>` counts as queued for so long if refused;
--          `rerun` or `replace` is the policy by which it would be merged with the successor, or replaced by it;
--          `copy` may be one though no marker is looked at; `above=<fence>` has seen a later time of this server
-- ARGV[4]  pid, attempt and time of publication
-- ARGV[5]  task id of the caller, or an empty text
-- ARGV[6]  its hostname, or an empty text
-- ARGV[7]  its task's name where the lock has another name, or an empty text; and then '\31' and a label if it has one
-- ARGV[8]  task whose merged arguments it takes, or an empty text
--
-- Returns  fence                                granted place 1 of a lock of which nothing was known
--          {1, now, place, fence, took_over, since, arguments}  granted; merged arguments, or an empty text
--          {2, now, wait}                       queued: ask again when woken, or after `wait` microseconds
--          {3, now, attempt, outcome}           done: a run of this message has ended
--          {0, now, crowd, successor, holders}  held: a few holders, or else those that go before; seven values each
--          {-1, now, crowd, successor, holders} another delivery of this message holds it, or waits

local key, token, ttl, task_id, task_name, merges = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[5], ARGV[7], ARGV[8] or ''
local limit = tonumber(string.match(ARGV[3], '^%d+'))
local attempt, published = string.match(ARGV[4], '^%S+ (%d+) (%d+)$')
local known = redis.call('HMGET', key, 'fence', 'places', 'first', 'last', 'next', 'queued', 'crowd', 'w' .. token, 'joined')
local highest, first, last, ticket = tonumber(known[2] or 1), tonumber(known[3]), tonumber(known[4]), tonumber(known[8])
local successor, queued, crowd = mark_of(known[5]), mark_of(known[6]), tonumber(known[7] or 0)
local places = read_places(key, highest, now + ttl * 1000)

local function says(word)
  return string.find(ARGV[3], word, 1, true)
end

local may_be_copy = KEYS[2] or says('copy')

local function lowest_fence()
  return tonumber(string.match(ARGV[3], 'above=(%d+)') or 0)
end

local function refuse(verdict, holders)
  return {verdict, now, crowd, successor and successor.task_id or '', holders}
end

-- One message, one body. But the cool-down of an earlier attempt does not keep a later one out, which takes its place.
local place
local function is_held_by_itself()
  local ids = fields_of_places(key, highest, ':i')
  for _, each in ipairs(places) do
    if each.alive and ids[each.place] == task_id and each.token ~= token then
      local is_later = tonumber(attempt) > grant_of(key, each.place).attempt
      if not is_on_hold(each.token) then
        if not is_later then
          redis.pcall('HSET', key, each.place .. ':c', 1)
        end
        return refuse(-1, described(key, {each}, 1))
      end
      if is_later then
        each.alive, place = false, each.place
      end
    end
  end
end

local function waits_by_itself()
  local turn = turn_of(key, task_id)
  local waiter = turn and waiter_of(redis.call('HGET', key, 'q' .. turn))
  if waiter and waiter.token ~= token and waiter.deadline > now then
    redis.pcall('HSET', key, 'turn:' .. task_id, turn .. ' 1')
    return refuse(-1, described_turns({waiter}))
  end
end

local function grant_again(each)
  local place = each.place
  local grant = grant_of(key, place)
  -- First, because a server out of memory refuses HSET if the script has written nothing before.
  expire_after(key, 2000 * ttl)
  set_deadline(key, each, now + ttl * 1000)
  local fence = grant.fence
  if lowest_fence() > fence then
    fence = math.max(lowest_fence(), tonumber(known[1]) + 1)
    local facts = string.gsub(redis.call('HGET', key, place .. ':'), '^(%d+) %S+', '%1 ' .. integer(fence - grant.since))
    redis.call('HSET', key, 'fence', integer(fence), place .. ':', facts)
  end
  local merged = merged_into(key, place, token)
  return {1, now, place, fence, 0, grant.since, merged and redis.call('HGET', key, 'merged:' .. merged) or ''}
end

-- For the first run that takes them. A run that was published later has newer ones itself, and ends the merged ones.
local function take_merged()
  local text, latest, by =
    unpack(redis.call('HMGET', key, 'merged:' .. merges, 'merged_at:' .. merges, 'merged_by:' .. merges))
  local at, memory = merged_at_of(latest)
  if not text or is_taken(key, by) then
    return ''
  elseif at <= tonumber(published) then
    forget_merged(key, merges)
    return ''
  end
  redis.call('HSET', key, 'merged_by:' .. merges, token)
  -- The time counts anew, because the message of this run may be delivered again.
  expire_after(key, memory * 1000)
  return text
end

-- The marks that the caller has left while it held nothing end with its grant. If it may be a copy, its original may have
-- left some, and died.
local function leave_all_else(place)
  if task_id_of(known[5]) == task_id then
    redis.call('HDEL', key, 'next', 'next:by')
    -- It has got another place than that of the holder that it has asked for.
    let_holders_stay(key, places)
  end
  if task_id_of(known[6]) == task_id then
    redis.call('HDEL', key, 'queued')
  end
  if task_id_of(known[9]) == task_id then
    redis.call('HDEL', key, 'joined')
  end
  if may_be_copy or says('asked') then
    redis.call('HDEL', key, 'with:' .. task_id)
  end
  if may_be_copy or says('returns') then
    leave_crowd(key, task_id)
  end
  if ticket then
    if leave_queue(key, ticket, token, task_id) then
      redis.call('HSET', key, place .. ':c', 1)
    end
    begin_queue_at(key, first, ticket == first and ticket + 1 or first, last)
  end
end

local function grant(place, took_over, fence)
  local fields = {
    place, token, token, integer(now + ttl * 1000), 'fence', integer(fence),
    place .. ':', integer(now) .. ' ' .. integer(fence - now) .. ' ' .. ttl .. ' ' .. ARGV[4],
    place .. ':i', task_id, place .. ':h', ARGV[6],
  }
  local function add(name, value)
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
  if task_name and task_name ~= '' then
    add(place .. ':n', task_name)
  end
  local arguments = merges ~= '' and take_merged() or ''
  if arguments ~= '' then
    add(place .. ':a', merges)
  end
  if place > highest then
    add('places', number_of_places(place))
  end
  redis.call('HSET', key, unpack(fields))
  leave_all_else(place)
  if redis.call('HLEN', key) == #fields / 2 + (known[2] and place <= highest and 1 or 0) then
    -- The hash has nothing else, so it expires with this holder, even if an earlier holder had a longer ttl.
    redis.call('PEXPIRE', key, 2 * ttl)
  else
    expire_after(key, 2000 * ttl)
  end
  return {1, now, place, fence, took_over, now, arguments}
end

if may_be_copy then
  local answer = KEYS[2] and past_run(KEYS[2], tonumber(attempt)) or is_held_by_itself() or waits_by_itself()
  if answer then
    return answer
  end
end

local held, soonest = 0, now + ttl * 1000
for _, each in ipairs(places) do
  if each.token == token then
    return grant_again(each)
  elseif each.alive then
    held, soonest = held + 1, math.min(soonest, each.deadline)
  else
    place = place or each.place
  end
end

-- The caller is kept out if at least as many calls go before it as there are free places.
local free, before = limit - held, {}
local function goes_before(each)
  before[#before + 1] = each
  if free > 0 then
    soonest = math.min(soonest, each.deadline)
  end
  return #before >= free and 'enough'
end

-- A refusal would end this call: with `rerun` it leaves its arguments to the successor; with `replace` a newer
-- successor runs in its place.
local function is_merged_with_the_successor()
  local by = redis.call('HGET', key, 'next:by') or ''
  local its_publication, its_policy, its_task = string.match(by, '^(%d+) (%S+) (.*)$')
  if says('rerun') then
    return its_policy == 'rerun' and its_task == merges
  end
  return says('replace') and published ~= '0' and tonumber(its_publication or 0) >= tonumber(published)
end

-- A run that is here goes before a message that may come: a caller that would occupy its slot meanwhile yields to no
-- message. A queued call does not wait for a later successor, because the successor heeds its mark, and they must not
-- wait for each other.
local is_queued = queued and queued.task_id == task_id
local is_another_next = successor and successor.task_id ~= task_id
if is_another_next and not says('waits') and (not is_queued or is_merged_with_the_successor()) then
  goes_before(successor)
end
if queued and not is_queued and says('heeds') and not says('waits') then
  goes_before(queued)
end
local overtaken_by = says('asked') and mark_of(redis.call('HGET', key, 'over:' .. task_id))
if overtaken_by then
  successor, before, free = overtaken_by, {overtaken_by}, 0
end

if first and free > #before then
  local front = walk_queue(key, first, (ticket or last + 1) - 1, goes_before)
  begin_queue_at(key, first, front, last)
  first = front
end

if free > #before then
  place = place or highest + 1
  local corpse = places[place] and places[place].token
  if corpse then
    empty_place(key, place, corpse)
  end
  local took_over = corpse and not is_on_hold(corpse) and 1 or 0
  return grant(place, took_over, math.max(tonumber(known[1] or 0) + 1, now, lowest_fence()))
end

-- A call that has to wait still counts as queued. If a server out of memory refuses the write, the mark ends by itself.
local function stay_queued(name, value, milliseconds)
  local mark, deadline = mark_of(value), now + milliseconds * 1000
  if mark and mark.task_id == task_id and mark.deadline < deadline then
    redis.pcall('HSET', key, name, integer(deadline) .. string.match(value, ' .*$'))
    expire_after(key, milliseconds * 1000)
  end
end
local queued_for = tonumber(string.match(ARGV[3], 'queued=(%d+)'))
if queued_for then
  stay_queued('queued', known[6], queued_for)
  stay_queued('joined', known[9], queued_for)
end

if says('waits') then
  local turn = ticket or (last or 0) + 1
  local wait = soonest - now
  if turn - (first or turn) >= NEAR then
    wait = math.max(wait, FAR)
  end
  join_queue(key, turn, {deadline = now + wait + GRACE, token = token, limit = limit, task_id = task_id})
  return {2, now, wait}
end

-- No other call is published, but the holder that it waits for must not wait for its mark.
if says('joins') and is_queued then
  redis.call('HSET', key, 'joined', redis.call('HGET', key, 'queued'))
  redis.call('HDEL', key, 'queued')
end
if says('crowds') then
  join_crowd(key, task_id)
  crowd = tonumber(redis.call('HGET', key, 'crowd') or 0)
end
local holders = described(key, places, A_FEW)
return refuse(0, #holders > 0 and holders or described_turns(before))
