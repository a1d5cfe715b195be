-- The successor, the call that runs next:
--   `next`  `<deadline> <supersedes_until> <published> <policy> <task id>\31<task name>`
--     deadline          until then a free place is kept for the successor; 0 once its run has begun
--     supersedes_until  until then older calls end in favour of the successor
--     policy            `rerun` or `replace`
local function successor_in(value)
  local deadline, supersedes_until, published, policy, task_id, task_name =
    string.match(value or '', '^(%d+) (%d+) (%d+) (%S+) ([^\31]*)\31([^\31]*)')
  if deadline then
    return {
      deadline = tonumber(deadline), supersedes_until = tonumber(supersedes_until), published = tonumber(published),
      policy = policy, task_id = task_id, task_name = task_name, holder_state = deadline == '0' and 'ended' or 'next',
    }
  end
end

local function set_successor(key, successor)
  local moments = {integer(successor.deadline), integer(successor.supersedes_until), integer(successor.published)}
  local text = table.concat(moments, ' ') .. ' ' .. successor.policy .. ' ' .. successor.task_id
  call('HSET', key, 'next', text .. '\31' .. successor.task_name)
  keep_at_least(key, math.max(successor.deadline, successor.supersedes_until) - now)
end

local function is_coming(successor)
  return successor ~= nil and successor.deadline > now
end

local function wake_successor(key, successor)
  if is_coming(successor) then
    redis.pcall('PUBLISH', key .. ':@' .. successor.task_id, 'free')
  end
end

-- How a caller relates to a successor of its kind (both `replace`, or both `rerun` the same task):
--
--   the successor               was published before the caller   was published later
--   is coming                   older_yields                      newer_wins
--   never came                  older_yields                      predecessor
--   has begun, is remembered    predecessor                       newer_wins if the caller has `newest`, else predecessor
--   has begun, is forgotten     none                              none
--
--   newest        set once a caller of this kind was marked or requeued
--   newer_wins    the caller ends; a `replace` caller ends for a later `rerun` successor, too
--   older_yields  the successor ends
--   predecessor   the caller also supersedes what the successor superseded; otherwise older calls would run after newer ones
--   stranger      a successor of another kind is coming and runs first
local function relation_to_successor(caller, successor)
  if not successor then
    return 'none'
  elseif successor.task_id == caller.task_id then
    return 'mine'
  end
  local is_later = successor.published >= caller.published
  local is_of_one_kind = successor.policy == caller.policy
    and (caller.policy == 'replace' or successor.task_name == caller.task_name)
  local comes, has_begun = is_coming(successor), successor.deadline == 0
  local is_remembered = has_begun and successor.supersedes_until > now
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
  return relation_to_successor(caller, successor) == 'newer_wins' and successor or nil
end

-- Returns a task id. A `Lock` has none, and supersedes nobody.
local function newer_run(key, places, caller)
  for _, place in ipairs(places) do
    if place.is_taken and not is_cooldown(place.token) then
      local grant, task_id = grant_of(key, place.number), call('HGET', key, place.number .. ':i')
      local published = grant.published > 0 and grant.published or grant.since
      local task_name = string.match(call('HGET', key, place.number .. ':n') or '', '^[^\31]*')
      local is_of_one_kind = caller.policy == 'replace' or task_name == caller.task_name
      if task_id and task_id ~= '' and is_of_one_kind and published > caller.published then
        return task_id
      end
    end
  end
end

local function ask_oldest_to_stop(key, places, successor_id)
  local oldest, since
  for _, place in ipairs(places) do
    if place.is_taken and not is_cooldown(place.token) then
      local granted_at = grant_of(key, place.number).since
      if not oldest or granted_at < since then
        oldest, since = place, granted_at
      end
    end
  end
  if oldest then
    ask_to_stop(key, oldest)
    call('HSET', key, 'replaced:' .. oldest.token, successor_id)
  end
end
