-- Give back a place, or a turn in the line, and call those whose turn it is.
--
-- KEYS[1]  lock key
-- @argument token   the token that was given to acquire.lua.
-- @argument words   `size`: the number of fields if the hash has nothing but this holder. `place`, if known. `min_hold`:
--                   milliseconds after its grant for which the place stays taken. If a run has ended for good: its
--                   `attempt`, and the fields of an `Ending`, with milliseconds in `kept`.
-- @argument marker  the marker of the message of such a run.
--
-- Returns  1 released | 0 lost before, another caller has the lock | 4 lost before, nobody has the lock. 2 more if the marker
--          was left. 8 more if nobody listens for the next 200 turns, so that more have to be called.

-- The usual release: the hash has only the fields of the usual acquire, so nobody waits and there are no marks.
local call, key = redis.call, KEYS[1]
if call('HLEN', key) == tonumber(string.match(words, '^size=(%d+)')) and call('HEXISTS', key, token) == 1 then
  return call('DEL', key)
end

-- From here on: everything that is not usual.
-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local RELEASED, TAKEN, GONE, MARKED, STOPPED_SHORT = 1, 0, 4, 2, 8
local words = words_in(words)
local known = redis.call('HMGET', key, 'places', 'first', 'last', 'front', 'w' .. token, 'next')
local highest, line, ticket = tonumber(known[1] or 1), line_in(known[2], known[3], known[4]), tonumber(known[5])
local answer = redis.call('EXISTS', key) == 1 and TAKEN or GONE

local function leave_place(place)
  -- The grant lies in the future if this server's clock was set back: count from now, or the place stays taken longer.
  local free_at = math.min(grant_of(key, place).since, now) + (words.min_hold or 0) * 1000
  if free_at <= now then
    empty_place(key, place, token)
    return false
  end
  -- Nobody has the new token, so nobody renews or releases the place.
  redis.call('HDEL', key, token, '!' .. token, 'broken:' .. token, 'replaced:' .. token, place .. ':c')
  redis.call('HSET', key, place, '~' .. token, '~' .. token, integer(free_at))
  expire_after(key, free_at - now)
  return true
end

-- First, because a server out of memory refuses HSET as the first write of a script, and allows HDEL.
if redis.call('HDEL', key, 'w' .. token) == 1 then
  leave_line(key, ticket, token)
  answer = RELEASED
end

local held, highest_left, is_kept, copy_has_come = 0, 1, false, false
for _, each in ipairs(read_places(key, highest)) do
  local is_mine = each.token == token and (not words.place or tonumber(words.place) == each.place)
  if is_mine then
    copy_has_come = redis.call('HEXISTS', key, each.place .. ':c') == 1
    is_kept = leave_place(each.place)
    answer = RELEASED
  end
  held = held + ((is_mine and is_kept or not is_mine and each.alive) and places_of(each.token) or 0)
  if each.token and (is_kept or not is_mine) then
    highest_left = each.place
  end
end
if highest > 1 and highest_left == 1 then
  redis.call('HDEL', key, 'places')
elseif highest_left < highest then
  redis.call('HSET', key, 'places', highest_left)
end

-- If the place was lost, whether a copy has come was lost with it, so leave the marker.
if marker and (answer ~= RELEASED or copy_has_come or words.is_due) then
  write_marker(key, marker, tonumber(words.attempt), words.outcome, tonumber(words.kept))
  answer = answer + MARKED
end
if line then
  -- A cool-down frees no place yet, but the first in line has to learn when it will.
  answer = answer + (call_next(key, line, held, is_kept and 1 or 0) and STOPPED_SHORT or 0)
end
call_successor(key, successor_in(known[6]))
delete_if_idle(key)
return answer
