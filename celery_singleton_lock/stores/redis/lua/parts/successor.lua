-- The successor is the call that runs next:
--   `next`  `<deadline> <supersedes> <published> <policy> <task id>\31<task name>`
-- `deadline`: until then the next free place is kept; 0 once the successor's run has begun. `supersedes`: until then the
-- successor supersedes older calls.
local function successor_in(value)
  local deadline, supersedes, published, policy, task_id, task_name =
    string.match(value or '', '^(%d+) (%d+) (%d+) (%S+) ([^\31]*)\31([^\31]*)')
  if deadline then
    return {
      deadline = tonumber(deadline), supersedes = tonumber(supersedes), published = tonumber(published),
      policy = policy, task_id = task_id, task_name = task_name, word = deadline == '0' and 'ended' or 'next',
    }
  end
end

local function set_successor(key, each)
  local moments = integer(each.deadline) .. ' ' .. integer(each.supersedes) .. ' ' .. integer(each.published)
  call('HSET', key, 'next', moments .. ' ' .. each.policy .. ' ' .. each.task_id .. '\31' .. each.task_name)
  expire_after(key, math.max(each.deadline, each.supersedes) - now)
end

local function is_coming(successor)
  return successor ~= nil and successor.deadline > now
end

local function wake_successor(key, successor)
  if is_coming(successor) then
    redis.pcall('PUBLISH', key .. ':@' .. successor.task_id, 'free')
  end
end

-- How a call stands to the successor, if both policies are `replace`, or both `rerun` of one task:
--
--   the successor               was published before the call   was published later
--   is coming                   older_yields                    newer_wins
--   never came                  older_yields                    predecessor
--   has begun, is remembered    predecessor                     newer_wins if the call was the newest, otherwise predecessor
--   has begun, is forgotten     none                            none
--
--   `mine`          The successor is the call.
--   `newer_wins`    The call ends in favour of the successor; a `replace` call also in favour of a later `rerun` successor.
--   `older_yields`  The successor ends in favour of the call.
--   `predecessor`   The call supersedes the calls that the successor superseded: otherwise these would run after newer ones.
--   `stranger`      Any other successor that is coming: the call waits until that has run.
local function relation(caller, successor)
  if not successor then
    return 'none'
  elseif successor.task_id == caller.task_id then
    return 'mine'
  end
  local is_later = successor.published >= caller.published
  local is_of_one_kind = successor.policy == caller.policy
    and (caller.policy == 'replace' or successor.task_name == caller.task_name)
  local comes, has_begun = is_coming(successor), successor.deadline == 0
  local is_remembered = has_begun and successor.supersedes > now
  if is_later and (is_of_one_kind or caller.policy == 'replace') and (comes or is_remembered and caller.newest) then
    return 'newer_wins'
  elseif not is_of_one_kind then
    return comes and 'stranger' or 'none'
  elseif has_begun and not is_remembered then
    return 'none'
  end
  return (has_begun or is_later) and 'predecessor' or 'older_yields'
end

local function newer_call(caller, queued, successor)
  if caller.policy and queued and queued.task_id ~= caller.task_id and queued.published > caller.published then
    return queued
  end
  return relation(caller, successor) == 'newer_wins' and successor or nil
end

-- No call yields to a `Lock`, which has no task id.
local function newer_run(key, places, caller)
  for _, each in ipairs(places) do
    if each.alive and not is_on_hold(each.token) then
      local grant, task_id = grant_of(key, each.place), call('HGET', key, each.place .. ':i')
      local published = grant.published > 0 and grant.published or grant.since
      local name = string.match(call('HGET', key, each.place .. ':n') or '', '^[^\31]*')
      local is_meant = caller.policy == 'replace' or name == caller.task_name
      if task_id and task_id ~= '' and is_meant and published > caller.published then
        return task_id
      end
    end
  end
end

local function ask_oldest_to_stop(key, places, successor_id)
  local oldest, since
  for _, each in ipairs(places) do
    if each.alive and not is_on_hold(each.token) then
      local began = grant_of(key, each.place).since
      if not oldest or began < since then
        oldest, since = each, began
      end
    end
  end
  if oldest then
    ask_to_stop(key, oldest)
    call('HSET', key, 'replaced:' .. oldest.token, successor_id)
  end
end

local function delete_if_idle(key)
  local known, many = call('HMGET', key, 'queued', 'cooldown', 'next', 'fence'), 0
  for i = 1, 4 do
    many = many + (known[i] and 1 or 0)
  end
  local successor = successor_in(known[3])
  local is_in_force = mark_of(known[1]) or mark_of(known[2])
    or successor and math.max(successor.deadline, successor.supersedes) > now
  if not is_in_force and call('HLEN', key) == many then
    call('DEL', key)
  end
end
