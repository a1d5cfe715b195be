-- Ask holders of a lock to stop. The caller then wakes turns by release.lua.
--
-- @argument by     person who asks
-- @argument words  `force`: free the places at once, although bodies may still run; `marks`: drop marks and cool-downs
-- The tokens of the holders follow.
--
-- Returns  {now, dropped, rows}  names of dropped marks, and the holders found

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local key, options = KEYS[1], parsed(words)
local lock = read_lock(key, '')
local meant, holders, dropped, is_cooling = {}, {}, {}, false
for i = 3, #ARGV do
  meant[ARGV[i]] = true
end

begin_writing(key)
for _, place in ipairs(lock.places) do
  if place.is_taken and meant[place.token] then
    holders[#holders + 1] = place
  elseif place.is_taken and options.marks and is_cooldown(place.token) then
    empty_place(key, place.number, place.token)
    is_cooling = true
  end
end
local rows = rows_of_holders(key, holders, math.huge) or {}
for _, place in ipairs(holders) do
  if options.force then
    empty_place(key, place.number, place.token)
  else
    ask_to_stop(key, place)
    call('HSET', key, 'broken:' .. place.token, by)
  end
end
if options.marks then
  local in_force = {queued = lock.queued, next = is_coming(lock.successor), cooldown = is_cooling or lock.cooldown}
  for _, name in ipairs({'queued', 'next', 'cooldown'}) do
    dropped[#dropped + 1] = in_force[name] and name or nil
  end
  call('HDEL', key, 'queued', 'next', 'cooldown')
end
delete_if_idle(key)
return {now, dropped, rows}
