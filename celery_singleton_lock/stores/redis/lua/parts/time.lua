local call, format = redis.call, string.format
local time = call('TIME')
local now = time[1] * 1000000 + time[2] -- microseconds, by this server's clock
