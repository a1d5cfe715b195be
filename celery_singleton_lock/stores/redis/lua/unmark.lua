-- End the marks and the turn of a call.
--
-- @argument task_id
-- @argument words      see `Store.unmark`
-- @argument task_name  if the lock has another name
--
-- Returns  1                           done
--          {'held', now, newer, rows}  another call goes before, so nothing changed; `newer`: its task id if it is newer

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local key, options = KEYS[1], parsed(words)
local lock, policy = read_lock(key, '@' .. task_id), options.succeeds
local successor, queued = lock.successor, lock.queued
local is_queued = queued and queued.task_id == task_id
local is_next = successor and successor.task_id == task_id
if policy then
  local published = options.published ~= '0' and tonumber(options.published) or now
  local caller = {task_id = task_id, task_name = task_name or '', policy = policy, published = published, newest = 'queued'}
  local newer = newer_call(caller, queued, successor)
  if newer then
    return {'held', now, newer.task_id, rows_of_calls({newer})}
  end
  -- The call begins now, without a lease. Remember it, because older calls that it has superseded may still come.
  local older_until = queued and (is_queued and queued.supersedes_until or queued.deadline) or 0
  if older_until > 0 then
    caller.deadline, caller.supersedes_until = 0, older_until
    call('HDEL', key, 'queued')
    set_successor(key, caller)
  end
elseif options.heeds and queued and not is_queued then
  return {'held', now, '', rows_of_calls({queued})}
end
if is_next and not policy then
  if successor.policy == 'replace' then
    withdraw_successors_request(key, lock.places)
  end
  call('HDEL', key, 'next')
end
if is_queued then
  call('HDEL', key, 'queued')
end
if options.ends_cooldown and lock.cooldown and lock.cooldown.task_id == task_id then
  call('HDEL', key, 'cooldown')
end
if options.call_ended then
  begin_writing(key)
  for number in ipairs(lock.places) do
    local grant = call('HGET', key, number .. ':i') == task_id and call('HGET', key, number .. ':')
    if grant and not call_has_ended(grant) then
      call('HSET', key, number .. ':', grant .. ' ended')
    end
  end
end
if lock.ticket then
  leave_line(key, lock.ticket, '@' .. task_id)
end
if lock.line and (lock.ticket or is_queued or is_next) then
  local taken = 0
  for _, place in ipairs(lock.places) do
    taken = taken + (place.is_taken and places_taken_by(place.token) or 0)
  end
  wake_next(key, lock.line, taken)
end
delete_if_idle(key)
return 1
