-- Give back a place or a turn, and wake the next turns.
--
-- @argument token   `~` to only write the marker, or only wake turns
-- @argument words   `size`: number of fields if the hash has only this holder; `place`, if known
--                   `min_hold`: milliseconds from the grant to the end of the cool-down
--                   for the marker: `attempt`, and the fields of an `Ending`
-- @argument marker  name of the field with the done marker
--
-- Returns  1                      the holder was alone, and the hash was deleted
--          {lost, marked, short}  `lost`: `taken`, `expired`, or empty; `marked`: 1 if the marker was written
--                                 `short`: 1 if turns are left to wake; repeat the script with `~`

local call, key = redis.call, KEYS[1]
local size = call('HLEN', key)
if size == tonumber(string.match(words, '^size=(%d+)')) and call('HEXISTS', key, token) == 1 then
  return call('DEL', key)
end

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local options = parsed(words)
local lock = read_lock(key, token)
local line, min_hold = lock.line, (options.min_hold or 0) * 1000
local lost = size == 0 and 'expired' or 'taken'
-- This HDEL comes first; otherwise a server out of memory would refuse HSET.
if call('HDEL', key, 'w' .. token) == 1 then
  leave_line(key, lock.ticket, token)
  lost = ''
end

local taken, highest_left, has_cooldown, copy_has_come = 0, 1, false, false
for number, place in ipairs(lock.places) do
  if place.token == token and (not options.place or tonumber(options.place) == number) then
    copy_has_come = marker and call('HEXISTS', key, number .. ':c') == 1
    -- The grant lies in the future if the server's clock was set back.
    local free_at = min_hold > 0 and math.min(grant_of(key, number).since, now) + min_hold or now
    has_cooldown, lost = free_at > now, ''
    place.is_taken = has_cooldown
    if has_cooldown then
      forget_token(key, number, token)
      -- Under the new token, the former holder can neither renew nor release the place.
      call('HSET', key, number, '~' .. token, '~' .. token, integer(free_at))
      keep_at_least(key, free_at - now)
    else
      empty_place(key, number, token)
      place.token = nil
    end
  end
  taken = taken + (place.is_taken and places_taken_by(place.token) or 0)
  highest_left = place.token and number or highest_left
end
if #lock.places > 1 and highest_left == 1 then
  call('HDEL', key, 'places')
elseif highest_left < #lock.places then
  call('HSET', key, 'places', highest_left)
end

-- After a loss, nobody knows whether a copy has come.
local is_marked = marker and (lost ~= '' or copy_has_come or options.is_due)
if is_marked then
  write_marker(key, marker, tonumber(options.attempt), options.outcome, tonumber(options.kept))
end
if marker and token == '~' then
  return {lost, 1, 0}
end
local stopped_short = line and wake_next(key, line, taken)
if line and has_cooldown then
  tell_near(key, line.front, math.min(line.front + NEXT_FEW - 1, line.last))
end
wake_successor(key, lock.successor)
if not line or line.first > line.last then
  delete_if_idle(key)
end
return {lost, is_marked and 1 or 0, stopped_short and 1 or 0}
