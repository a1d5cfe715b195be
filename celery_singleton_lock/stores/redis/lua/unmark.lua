-- End the marks and the turn of a call that holds nothing.
--
-- KEYS[1]  lock key
-- @argument task_id
-- @argument words      `ends_cooldown`: others may be published at once. `call_ended`: the call has ended, although its run
--                      may still hold a place. `heeds`: a queued call goes before. Or, of a call that begins and gives way
--                      only to a newer one, fields of its `Claim`: `succeeds`, `supersedes_for`, `published`.
-- @argument task_name  the task's name if the lock has another one.
--
-- Returns  1                           the marks have ended, if there were any.
--          {'held', now, newer, holders}  Nothing has changed: `holders` has the queued call, and `newer` is its task id if
--                                      the call ends in its favour, else an empty text.

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
-- The mark, the turn or the successor may have kept others out, so call the next.
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
