-- Mark a call as queued, or return the call that is in its way.
--
-- @argument task_id
-- @argument lasts     milliseconds until the mark ends
-- @argument cooldown  milliseconds for which no other call is published
-- @argument words     see `Store.mark_queued`; durations in milliseconds
-- @argument about     what follows the task id in the mark, see parts/marks.lua
--
-- Returns  {'marked', sooner}       publish the call, due `sooner` microseconds earlier
--          {'held', now, '', rows}  the queued call, or else runs, or else the call of the cool-down

-- @include time
local key = KEYS[1]
local task_and_about = about and task_id .. '\31' .. about or task_id
local mark = format('%d', now + lasts * 1000) .. ' ' .. task_and_about
local is_marked = call('HSETNX', key, 'queued', mark) == 1
-- NX succeeds only on a new hash, because every other hash has an expiry. In a new hash, nothing is in the call's way.
if is_marked and call('PEXPIRE', key, lasts, 'NX') == 1 then
  if cooldown ~= '0' then
    call('HSET', key, 'cooldown', format('%d', now + cooldown * 1000) .. ' ' .. task_id)
    call('PEXPIRE', key, cooldown, 'GT')
  end
  return {'marked', 0}
end

-- @include lock
-- @include marks
local function set_mark(name, milliseconds, text)
  call('HSET', key, name, integer(now + milliseconds * 1000) .. ' ' .. text)
  keep_at_least(key, milliseconds * 1000)
end

local function refuse(rows)
  if is_marked then
    call('HDEL', key, 'queued')
  end
  return {'held', now, '', rows}
end

local options = parsed(words)
local limit = tonumber(options.limit)
local known = call('HMGET', key, 'places', 'queued', 'cooldown')
local queued, cooldown_mark = mark_in(known[2]), mark_in(known[3], 'cooldown')
local is_repeated = not is_marked and queued and queued.task_id == task_id
local older_until, first_published = queued and queued.supersedes_until or 0, queued and queued.first_published or 0

-- 1. Is another call queued that the caller may not supersede?
if queued and queued.task_id ~= task_id then
  if options.newest and queued.published < mark_in(mark).published then
    older_until = math.max(queued.deadline, older_until)
    first_published = first_published > 0 and first_published or queued.published
    if cooldown_mark and cooldown_mark.task_id == queued.task_id then
      cooldown_mark = nil -- a new cool-down begins
    end
  elseif options.sent ~= 'over' then
    return refuse(rows_of_calls({queued}))
  end
end

-- 2. Do runs take all places, or does a cool-down last?
local places, taken = {}, 0
if not is_repeated and (limit > 0 or cooldown_mark) then
  places = read_places(key, tonumber(known[1] or 1))
  -- A run whose call has ended does not count, because it will not do the new work.
  for number, place in ipairs(places) do
    place.is_taken = place.is_taken and (is_cooldown(place.token) or not call_has_ended(call('HGET', key, number .. ':')))
    taken = taken + (place.is_taken and places_taken_by(place.token) or 0)
  end
end
local others_cooldown = cooldown_mark and cooldown_mark.task_id ~= task_id
if limit > 0 and taken >= limit then
  return refuse(rows_of_holders(key, places))
elseif others_cooldown and not options.sent then
  return refuse(rows_of_holders(key, places) or rows_of_calls({cooldown_mark}))
end

-- 3. When is the call due? Calls that supersede each other must not postpone the work for ever.
local sooner = 0
if options.newest and older_until > 0 then
  task_and_about = task_and_about .. ',' .. integer(older_until) .. ',' .. integer(first_published)
  if options.within and first_published > 0 then
    sooner = math.max(0, now + options.due_in * 1000 - math.max(now, first_published + options.within * 1000))
  end
end
-- A mark without `due_for` ends `lock_queue_ttl` after the due time, which is now `sooner` earlier.
-- A mark with `due_for` ends when the message expires, whenever the call is due.
set_mark('queued', lasts - (mark_in(mark).due_for == 0 and math.floor(sooner / 1000) or 0), task_and_about)
if cooldown ~= '0' and not others_cooldown then
  set_mark('cooldown', cooldown, task_id)
end
return {'marked', sooner}
