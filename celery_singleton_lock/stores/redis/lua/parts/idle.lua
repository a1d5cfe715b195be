-- A lock with nothing in it that still counts is deleted at once.
local function delete_if_idle(key)
  local known = redis.call('HMGET', key, 'queued', 'quiet', 'next', 'fence', '1')
  if known[5] then
    return
  end
  local silent, successor = known[4] and 1 or 0, successor_in(known[3])
  for _, mark in ipairs({known[1], known[2]}) do
    silent = silent + (mark and not mark_of(mark) and 1 or 0)
  end
  if successor and math.max(successor.deadline, successor.supersedes) <= now then
    silent = silent + 1
  end
  if redis.call('HLEN', key) > silent then
    sweep_markers(key)
  end
  if redis.call('HLEN', key) == silent then
    redis.call('DEL', key)
  end
end
