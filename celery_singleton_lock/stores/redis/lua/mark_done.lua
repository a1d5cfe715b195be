-- Note that a run of a message has ended, for later deliveries of the message.
--
-- KEYS[1]  lock key
-- @argument marker
-- @argument attempt
-- @argument outcome
-- @argument lasts    milliseconds for which the marker is kept.
--
-- Returns  1

-- @include time
-- @include lock
-- @include marks
write_marker(KEYS[1], marker, tonumber(attempt), outcome, tonumber(lasts))
return 1
