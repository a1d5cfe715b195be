-- Note that a run of a message has ended, for later deliveries of it.
--
-- KEYS[1]  done marker of the message
-- ARGV[1]  which attempt it was
-- ARGV[2]  its outcome
-- ARGV[3]  milliseconds for which the marker is kept
--
-- Returns  1 noted, or more is known already

write_marker(KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3])
return 1
