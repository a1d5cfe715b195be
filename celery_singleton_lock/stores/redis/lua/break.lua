-- Ask the holders of a lock to end, and drop the marks that keep others out.
--
-- A holder hears of it at its next renewal, and releases; `force` does not wait for that. Marks and cool-downs end at
-- once, because no body runs under them. Waiters keep their turns, and release.lua has to wake them.
--
-- KEYS[1]  lock key
-- ARGV[1]  token of one holder; or an empty text for all holders, the cool-downs and the marks
-- ARGV[2]  who asks
-- ARGV[3]  `force` frees the places at once, though their holders may go on; or an empty text
--
-- Returns  {now, dropped, holders}  the marks that were in force; the holders that were asked, seven values each

-- @include time
-- @include lock
-- @include marks
local key, only, by = KEYS[1], ARGV[1], ARGV[2]
local known = redis.call('HMGET', key, 'places', 'queued', 'quiet', 'next')
local successor = successor_in(known[4])
local holders, dropped = {}, {}

local function ask_to_end(each)
  ask_to_make_way(key, each)
  redis.call('HSET', key, 'broken:' .. each.token, by)
end

local function drop(word)
  dropped[#dropped + 1] = word
end

-- Does nothing, but a server out of memory refuses HSET if the script has written nothing before.
redis.call('HDEL', key, '')
local cooling = false
for _, each in ipairs(read_places(key, tonumber(known[1] or 1))) do
  if each.alive and is_on_hold(each.token) and only == '' then
    empty_place(key, each.place, each.token)
    cooling = true
  elseif each.alive and not is_on_hold(each.token) and (only == '' or each.token == only) then
    holders[#holders + 1] = each
  end
end
local rows = described(key, holders, math.huge)
for _, each in ipairs(holders) do
  if ARGV[3] == 'force' then
    empty_place(key, each.place, each.token)
  else
    ask_to_end(each)
  end
end
if only == '' then
  if mark_of(known[2]) then
    drop('queued')
  end
  if successor and successor.deadline > now then
    drop('next')
  end
  if cooling or mark_of(known[3]) then
    drop('quiet')
  end
  redis.call('HDEL', key, 'queued', 'next', 'quiet')
end
delete_if_idle(key)
return {now, dropped, rows}
