-- Say who holds a lock, who comes next and how many come again and again, and change nothing.
--
-- KEYS[1]  lock key
--
-- Returns  {0, now, crowd, successor, holders}  every holder, seven values each

local key = KEYS[1]
local known = redis.call('HMGET', key, 'places', 'next', 'crowd')
local successor = mark_of(known[2])
local holders = described(key, read_places(key, tonumber(known[1] or 1), math.huge), math.huge)
return {0, now, tonumber(known[3] or 0), successor and successor.task_id or '', holders}
