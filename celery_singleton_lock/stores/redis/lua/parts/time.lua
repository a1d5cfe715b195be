-- Locals, because looking globals up at each use costs a twentieth of a script.
local call, format = redis.call, string.format
local time = call('TIME')
local now = time[1] * 1000000 + time[2] -- microseconds, by this server's clock
