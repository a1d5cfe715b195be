-- End the marks of a call that holds nothing: it is no longer queued or next, and its message has no turn.
--
-- KEYS[1]  lock key
-- @argument task_id
-- @argument words      `ends_cooldown` lets others be published at once; `call_ended` notes that the call has ended, although
--                      its run may hold a place still; `heeds` gives way to another call that is queued;
--                      of a call that begins, and gives way to a newer one only: `succeeds`, `supersedes_for`, `published`
-- @argument task_name  of such a call where the lock has another name; otherwise left out
--
-- Returns  1                     ended, if there was anything
--          {'held', now, newer, holders}  the call that is queued; the newer one in whose favour this one ends, or an empty
--                                text

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local key, words = KEYS[1], words_in(words)
local known = redis.call('HMGET', key, 'next', 'queued', 'cooldown', 'places', 'first', 'last', 'front', 'w@' .. task_id)
local successor, queued = successor_in(known[1]), mark_of(known[2])

local policy = words.succeeds
if policy then
  local published = words.published ~= '0' and tonumber(words.published) or now
  local this_call = {task_id = task_id, task_name = task_name or '', policy = policy, published = published, newest = 'queued'}
  local newer = newer_call(this_call, queued, successor)
  if newer then
    return refused(newer.task_id, described_turns({newer}))
  end
  local older_until = queued and (queued.task_id == task_id and queued.supersedes or queued.deadline) or 0
  if older_until > 0 then
    this_call.deadline, this_call.supersedes = 0, math.max(older_until, now + words.supersedes_for * 1000)
    redis.call('HDEL', key, 'queued')
    set_successor(key, this_call)
  end
elseif words.heeds and queued and queued.task_id ~= task_id then
  return refused('', described_turns({queued}))
end
if successor and successor.task_id == task_id and not policy then
  if successor.policy == 'replace' then
    let_holders_stay(key, read_places(key, tonumber(known[4] or 1)))
  end
  redis.call('HDEL', key, 'next')
end
local was_queued = task_id_of(known[2]) == task_id
if was_queued then
  redis.call('HDEL', key, 'queued')
end
if words.ends_cooldown and task_id_of(known[3]) == task_id then
  redis.call('HDEL', key, 'cooldown')
end
if words.call_ended then
  note_end(key, tonumber(known[4] or 1), task_id)
end
if known[8] then
  leave_line(key, known[8], '@' .. task_id)
end
-- The mark, the turn or the successor may have kept out those that wait.
local line = line_in(known[5], known[6], known[7])
if line and (known[8] or was_queued or successor and successor.task_id == task_id) then
  local held = 0
  for _, each in ipairs(read_places(key, tonumber(known[4] or 1))) do
    held = held + (each.alive and places_of(each.token) or 0)
  end
  call_next(key, line, held, 0)
end
delete_if_idle(key)
return 1
