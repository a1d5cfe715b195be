-- Mark a call as the one that is queued, or say which call is queued, or runs, in its place.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  milliseconds after which the mark ends if the call never comes
-- ARGV[3]  if at least so many runs hold the key, they are in the way as well; or 0 for never. Then, for a call that is sent in any case:
--          `anyway`: no cool-down keeps its mark off; `over`: it also takes the mark of another call over. And `newest`:
--          it takes the place of a call that was published before it; then perhaps `due=<milliseconds>` until it is due,
--          and `within=<milliseconds>` after the first of those whose place it takes, if that is sooner
-- ARGV[4]  milliseconds for which nothing else is published
-- ARGV[5]  the rest of its mark, if there is any: see parts/marks.lua
--
-- Returns  1                     queued: publish it
--          {1, sooner}           queued: publish it, due so many microseconds sooner
--          {0, now, '', holders} the call that is queued, else one that runs, else the one of the cool-down

-- @include time
-- The usual mark: the call is the first of its key, so nothing can be in its way.
local key, mine = KEYS[1], ARGV[1]
local labelled = ARGV[5] and mine .. '\31' .. ARGV[5] or mine
local mark = format('%d', now + ARGV[2] * 1000) .. ' ' .. labelled
local is_marked = call('HSETNX', key, 'queued', mark) == 1
-- Every lock has an expiry, so a hash without one is new: this mark has just made it.
local is_first = is_marked and call('PEXPIRE', key, ARGV[2], 'NX') == 1
if is_first and ARGV[4] == '0' then
  return 1
end

-- From here on: everything that is not usual.
-- @include lock
-- @include marks
local function says(word)
  return string.find(ARGV[3], word, 1, true)
end
local limit = tonumber(string.match(ARGV[3], '^%d+'))
if is_first then
  set_mark(key, 'cooldown', ARGV[4], mine)
  return 1
end

local known = redis.call('HMGET', key, 'places', 'queued', 'cooldown')
local queued, cooldown = mark_of(known[2]), mark_of(known[3])
local is_repeated = not is_marked and queued and queued.task_id == mine

local function refuse(holders)
  if is_marked then
    redis.call('HDEL', key, 'queued')
  end
  return {0, now, '', holders}
end

local older_until, first = queued and queued.supersedes or 0, queued and queued.first or 0
if queued and queued.task_id ~= mine then
  if says('newest') and queued.published < mark_of(mark).published then
    older_until = math.max(queued.deadline, older_until)
    first = first > 0 and first or queued.published
    if cooldown and cooldown.task_id == queued.task_id then
      cooldown = nil -- the cool-down begins anew
    end
  elseif not says('over') then
    return refuse(described_turns({queued}))
  end
end
local places, held = {}, 0
if not is_repeated and (limit > 0 or cooldown) then
  local highest = tonumber(known[1] or 1)
  places = read_places(key, highest)
  -- A run whose call has ended stands for no other call: nobody would store a result for that one.
  for place, grant in ipairs(read_numbered(key, '', 1, highest, ':')) do
    local each = places[place]
    each.alive = each.alive and (is_on_hold(each.token) or not has_ended(grant))
    held = held + (each.alive and places_of(each.token) or 0)
  end
end
if limit > 0 and held >= limit then
  return refuse(described(key, places, A_FEW))
elseif cooldown and cooldown.task_id ~= mine and not (says('anyway') or says('over')) then
  cooldown.token = '~' -- as in a place that a cool-down keeps
  return refuse(held > 0 and described(key, places, A_FEW) or described_turns({cooldown}))
end
local sooner = 0
if says('newest') and older_until > 0 then
  labelled = labelled .. ',' .. integer(older_until) .. ',' .. integer(first)
  local due, within = string.match(ARGV[3], 'due=(%d+) within=(%d+)')
  if within and first > 0 then
    sooner = math.max(0, now + due * 1000 - math.max(now, first + within * 1000))
  end
end
-- A mark that `expires` ends does so at a moment of its own.
set_mark(key, 'queued', ARGV[2] - (mark_of(mark).due_for == 0 and math.floor(sooner / 1000) or 0), labelled)
if ARGV[4] ~= '0' and not (cooldown and cooldown.task_id ~= mine) then
  set_mark(key, 'cooldown', ARGV[4], mine)
end
return sooner > 0 and {1, integer(sooner)} or 1
