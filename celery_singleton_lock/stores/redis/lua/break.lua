-- Ask holders of a lock to stop, and drop the marks that keep others out. The caller then wakes waiters by release.lua.
--
-- KEYS[1]  lock key
-- @argument by     the person who asks
-- @argument words  `force`: free the places at once, although bodies may still run. `marks`: drop marks and cool-downs.
-- The tokens of the holders follow.
--
-- Returns  {now, dropped, rows}  the names of the marks that were dropped, and the holders that were found

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local key, words = KEYS[1], words_in(words)
local lock = read_lock(key, '')
local meant, holders, dropped, is_cooling = {}, {}, {}, false
for i = 3, #ARGV do
  meant[ARGV[i]] = true
end

begin_writing(key)
for _, each in ipairs(lock.places) do
  if each.alive and meant[each.token] then
    holders[#holders + 1] = each
  elseif each.alive and words.marks and is_on_hold(each.token) then
    empty_place(key, each.place, each.token)
    is_cooling = true
  end
end
local rows = described(key, holders, math.huge) or {}
for _, each in ipairs(holders) do
  if words.force then
    empty_place(key, each.place, each.token)
  else
    ask_to_stop(key, each)
    call('HSET', key, 'broken:' .. each.token, by)
  end
end
if words.marks then
  local in_force = {queued = lock.queued, next = is_coming(lock.successor), cooldown = is_cooling or lock.cooldown}
  for _, word in ipairs({'queued', 'next', 'cooldown'}) do
    dropped[#dropped + 1] = in_force[word] and word or nil
  end
  call('HDEL', key, 'queued', 'next', 'cooldown')
end
delete_if_idle(key)
return {now, dropped, rows}
