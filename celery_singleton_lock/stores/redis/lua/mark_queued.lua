-- Mark a call as queued, or name the call that is in its way.
--
-- KEYS[1]  lock key
-- @argument task_id
-- @argument lasts     milliseconds until the mark ends if the call never comes
-- @argument cooldown  milliseconds for which no other call is published
-- @argument words     see `Store.mark_queued`; durations in milliseconds
-- @argument about     the label and the rest of the mark, see parts/marks.lua
--
-- Returns  {'marked', sooner}       Publish the call, due earlier by so many microseconds.
--          {'held', now, '', rows}  The queued call is in the way, else a run, else the call of the cool-down.

-- @include time
local key = KEYS[1]
local labelled = about and task_id .. '\31' .. about or task_id
local mark = format('%d', now + lasts * 1000) .. ' ' .. labelled
local is_marked = call('HSETNX', key, 'queued', mark) == 1
-- Only a new hash has no expiry.
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
  expire_after(key, milliseconds * 1000)
end

local function refuse(rows)
  if is_marked then
    call('HDEL', key, 'queued')
  end
  return {'held', now, '', rows}
end

local words = words_in(words)
local limit = tonumber(words.limit)
local known = call('HMGET', key, 'places', 'queued', 'cooldown')
local queued, cooling = mark_of(known[2]), mark_of(known[3], 'cooldown')
local is_repeated = not is_marked and queued and queued.task_id == task_id
local older_until, first = queued and queued.supersedes or 0, queued and queued.first or 0
if queued and queued.task_id ~= task_id then
  if words.newest and queued.published < mark_of(mark).published then
    older_until = math.max(queued.deadline, older_until)
    first = first > 0 and first or queued.published
    if cooling and cooling.task_id == queued.task_id then
      cooling = nil -- a new cool-down begins
    end
  elseif words.sent ~= 'over' then
    return refuse(described_calls({queued}))
  end
end
local places, held = {}, 0
if not is_repeated and (limit > 0 or cooling) then
  places = read_places(key, tonumber(known[1] or 1))
  -- A run whose call has ended must not keep a new call out: nobody would do the new work.
  for place, each in ipairs(places) do
    each.alive = each.alive and (is_on_hold(each.token) or not has_ended(call('HGET', key, place .. ':')))
    held = held + (each.alive and places_of(each.token) or 0)
  end
end
local is_cooling = cooling and cooling.task_id ~= task_id
if limit > 0 and held >= limit then
  return refuse(described(key, places))
elseif is_cooling and not words.sent then
  return refuse(described(key, places) or described_calls({cooling}))
end
local sooner = 0
if words.newest and older_until > 0 then
  labelled = labelled .. ',' .. integer(older_until) .. ',' .. integer(first)
  if words.within and first > 0 then
    sooner = math.max(0, now + words.due_in * 1000 - math.max(now, first + words.within * 1000))
  end
end
-- A mark with `due_for` ends at `expires`; any other moves with the call's due time.
set_mark('queued', lasts - (mark_of(mark).due_for == 0 and math.floor(sooner / 1000) or 0), labelled)
if cooldown ~= '0' and not is_cooling then
  set_mark('cooldown', cooldown, task_id)
end
return {'marked', sooner}
