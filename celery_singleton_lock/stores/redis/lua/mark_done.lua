-- Note that a run of a message has ended, for later deliveries of it.
--
-- KEYS[1]  lock key
-- ARGV[1]  marker of the message
-- ARGV[2]  which attempt it was
-- ARGV[3]  its outcome
-- ARGV[4]  milliseconds for which the marker is kept
--
-- Returns  1 noted, or more is known already

-- @include time
-- @include lock
-- @include marks
write_marker(KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]))
sweep_markers(KEYS[1])
return 1
