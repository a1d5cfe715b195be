-- Read a lock for operators.
-- Returns  {now, fence, waiting, marks, holders, turns, asked}, see `LockState`
--   marks, holders, turns  rows, see parts/lock.lua
--   asked                  {token, person} of each holder that was asked to stop; person is empty if a successor asked

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local MOST_SHOWN = 160 -- tickets; reading more would block the server
local key = KEYS[1]
local lock = read_lock(key, '')
local line, marks, turns, asked, waiting = lock.line, {}, {}, {}, 0
for _, mark in pairs({lock.queued, lock.successor, lock.cooldown}) do
  if mark.deadline > now then
    marks[#marks + 1] = mark
  end
end

local function add_turns(from, stop)
  for ticket = from, stop do
    local turn = read_turn(key, ticket)
    if turn and turn.deadline > now then
      turn.is_unheard = turn.state == UNHEARD
      turns[#turns + 1] = turn
    end
  end
end

if line then
  -- Half of MOST_SHOWN is for UNHEARD turns, and half for the turns after them. Each kind may take what the other leaves.
  local unheard, others = line.front - line.first, line.last - line.front + 1
  local unheard_read = math.min(unheard, math.max(MOST_SHOWN / 2, MOST_SHOWN - others))
  local stop = math.min(line.last, line.front + MOST_SHOWN - unheard_read - 1)
  add_turns(line.first, line.first + unheard_read - 1)
  add_turns(line.front, stop)
  waiting = #turns + unheard - unheard_read + line.last - stop
end
for _, place in ipairs(lock.places) do
  if place.is_taken and place.asked_to_stop then
    asked[#asked + 1] = {place.token, call('HGET', key, 'broken:' .. place.token) or ''}
  end
end
local rows = rows_of_holders(key, lock.places, math.huge) or {}
return {now, lock.fence or '', waiting, rows_of_calls(marks, math.huge), rows, rows_of_calls(turns, math.huge), asked}
