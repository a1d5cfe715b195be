-- End the marks and the turn of a call that holds nothing.
--
-- KEYS[1]  lock key
-- @argument task_id
-- @argument words      see `Store.unmark`
-- @argument task_name  the task's name if the lock has another name
--
-- Returns  1                           The call has no mark and no turn any more.
--          {'held', now, newer, rows}  Another call goes before, and nothing has changed. `newer`: its task id if it supersedes
--                                      this one, or empty.

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local key, words = KEYS[1], words_in(words)
local lock, policy = read_lock(key, '@' .. task_id), words.succeeds
local successor, queued = lock.successor, lock.queued
local is_queued = queued and queued.task_id == task_id
local is_next = successor and successor.task_id == task_id
if policy then
  local published = words.published ~= '0' and tonumber(words.published) or now
  local this_call = {task_id = task_id, task_name = task_name or '', policy = policy, published = published, newest = 'queued'}
  local newer = newer_call(this_call, queued, successor)
  if newer then
    return {'held', now, newer.task_id, described_calls({newer})}
  end
  local older_until = queued and (is_queued and queued.supersedes or queued.deadline) or 0
  if older_until > 0 then
    this_call.deadline, this_call.supersedes = 0, older_until
    call('HDEL', key, 'queued')
    set_successor(key, this_call)
  end
elseif words.heeds and queued and not is_queued then
  return {'held', now, '', described_calls({queued})}
end
if is_next and not policy then
  if successor.policy == 'replace' then
    let_holders_stay(key, lock.places)
  end
  call('HDEL', key, 'next')
end
if is_queued then
  call('HDEL', key, 'queued')
end
if words.ends_cooldown and lock.cooldown and lock.cooldown.task_id == task_id then
  call('HDEL', key, 'cooldown')
end
if words.call_ended then
  begin_writing(key)
  for place in ipairs(lock.places) do
    local grant = call('HGET', key, place .. ':i') == task_id and call('HGET', key, place .. ':')
    if grant and not has_ended(grant) then
      call('HSET', key, place .. ':', grant .. ' ended')
    end
  end
end
if lock.ticket then
  leave_line(key, lock.ticket, '@' .. task_id)
end
if lock.line and (lock.ticket or is_queued or is_next) then
  local held = 0
  for _, each in ipairs(lock.places) do
    held = held + (each.alive and places_of(each.token) or 0)
  end
  wake_next(key, lock.line, held)
end
delete_if_idle(key)
return 1
