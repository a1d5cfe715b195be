-- The time of this server, in microseconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function integer(number)
  return string.format('%.0f', number)
end

-- No earlier than it would have.
local function expire_after(key, microseconds)
  local milliseconds = math.ceil(microseconds / 1000)
  if redis.call('PEXPIRE', key, milliseconds, 'NX') == 0 then
    redis.call('PEXPIRE', key, milliseconds, 'GT')
  end
end
