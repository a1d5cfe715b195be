-- Become the run that comes next, or learn which call runs in place of this one. Callers ask this after a refusal.
--
-- `rerun` merges calls of one task: the first becomes the successor, the others leave it their arguments if those are
-- newer. `replace` lets the call that was published last be the successor, and asks the oldest holder to make way once
-- the successor has come again, and so is safe in the broker. Nobody waits for a successor that has not come for
-- PATIENCE.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  task name
-- ARGV[3]  `rerun` or `replace`
-- ARGV[4]  when the call was published first, in microseconds; 0 if that is not known
-- ARGV[5]  1 if it has asked before, or 0
-- ARGV[6]  its arguments for `rerun`, or an empty text to be asked for them if they are needed
-- ARGV[7]  milliseconds for which merged arguments and replaced successors are remembered
-- ARGV[8]  its task name as holders have it, or an empty text
--
-- Returns  {1, now}           it is the successor
--          {0, now, task_id}  that one runs in its place
--          {2, now}           a call of another task is the successor, or one that replaces, so it has to come again
--          {3, now}           ask again with the arguments

local PATIENCE = 30000 -- milliseconds

local key, mine, task_name, policy = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local has_asked, memory = ARGV[5] == '1', tonumber(ARGV[7])
local published = ARGV[4] == '0' and now or tonumber(ARGV[4])
local known = redis.call('HMGET', key, 'places', 'next', 'next:by', 'over:' .. mine)
local successor, latest, overtaken_by = mark_of(known[2]), task_id_of(known[2]), mark_of(known[4])
local merged_known = redis.call('HMGET', key, 'merged_at:' .. task_name, 'merged_by:' .. task_name)
local merged_at = merged_at_of(merged_known[1])
local its_publication, its_policy, its_task = string.match(known[3] or '', '^(%d+) (%S+) (.*)$')
local places = read_places(key, tonumber(known[1] or 1), math.huge)

-- Others have ended in its favour, or will, so it does not give up.
local function let_run_in_place_of_others(task_id)
  redis.call('HSET', key, 'with:' .. task_id, 1)
  expire_after(key, memory * 1000)
end

local function become_successor()
  set_mark(key, 'next', PATIENCE, mine)
  redis.call('HSET', key, 'next:by', table.concat({integer(published), policy, task_name}, ' '))
  return {1, now}
end

-- The holders that could make way, each with its grant; read once, and only if needed.
local holders
local function all_holders()
  if not holders then
    holders = {}
    for place, grant in ipairs(fields_of_places(key, #places, ':')) do
      local each = places[place]
      if each.alive and not is_on_hold(each.token) then
        each.grant = grant_in(grant)
        holders[#holders + 1] = each
      end
    end
  end
  return holders
end

local function runs_my_task(holder)
  return string.match(redis.call('HGET', key, holder.place .. ':n') or '', '^[^\31]*') == ARGV[8]
end

-- A `Lock` is no call, so no call ends in its favour.
local function holder_published_after(moment, is_meant)
  for _, each in ipairs(all_holders()) do
    local newer = (each.grant.published > 0 and each.grant.published or each.grant.since) > moment
    local task_id = newer and (not is_meant or is_meant(each)) and redis.call('HGET', key, each.place .. ':i')
    if task_id and task_id ~= '' then
      return task_id
    end
  end
end

local function ask_oldest_to_make_way()
  local oldest
  for _, each in ipairs(all_holders()) do
    if not oldest or each.grant.since < oldest.grant.since then
      oldest = each
    end
  end
  if oldest and not oldest.makes_way then
    oldest.makes_way = true
    set_deadline(key, oldest, oldest.deadline)
    redis.call('HDEL', key, oldest.token)
  end
end

local function merge()
  if published > math.max(merged_at, tonumber(its_publication)) then
    if ARGV[6] == '' then
      return {3, now}
    end
    leave_merged(key, task_name, ARGV[6], published, memory)
  end
  let_run_in_place_of_others(successor.task_id)
  return {0, now, successor.task_id}
end

local function rerun()
  if overtaken_by then
    return {0, now, overtaken_by.task_id}
  elseif successor and successor.task_id ~= mine then
    return its_task == task_name and its_policy == 'rerun' and merge() or {2, now}
  end
  local waiting_at = is_taken(key, merged_known[2]) and 0 or merged_at
  local newer = has_asked and not successor and holder_published_after(math.max(published, waiting_at), runs_my_task)
  return newer and {0, now, newer} or become_successor()
end

local function replace()
  if overtaken_by then
    return {0, now, overtaken_by.task_id}
  elseif successor and successor.task_id ~= mine and tonumber(its_publication) >= published then
    let_run_in_place_of_others(successor.task_id)
    return {0, now, successor.task_id}
  end
  local newer = holder_published_after(published)
  if newer then
    return {0, now, newer}
  end
  -- The older successor, whether given up or not, has to learn of this when it comes. A rerun is not replaced; it
  -- comes after this one.
  if latest and latest ~= mine and its_policy == 'replace' and tonumber(its_publication) < published then
    set_mark(key, 'over:' .. latest, memory, mine)
    let_run_in_place_of_others(mine)
  end
  if has_asked then
    ask_oldest_to_make_way()
  end
  return become_successor()
end

return policy == 'rerun' and rerun() or replace()
