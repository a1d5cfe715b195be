-- Fields of holders (all moments in microseconds):
--   `<place>`           token: `~...` for a cool-down, `*...` for the whole lock
--   `<token>`           deadline; renamed to `!<token>` once the holder is asked to stop
--   `broken:<token>`    person who asked the holder to stop
--   `replaced:<token>`  task id of the successor that asked the holder to stop
--   `<place>:`          `<granted_at> <fence minus granted_at> <ttl in ms> <pid> <attempt> <published> <words>`
--                       `no-result`: others cannot read the result
--                       `ended`: the next call may be published, although this run may go on
--   `<place>:i`         task id
--   `<place>:h`         hostname
--   `<place>:n`         task name, empty if the lock has the same name; then `\31<label>` if there is a label
--   `<place>:c`         1 once a copy of the message has come
--   `places`            highest place in use, if above 1
--   `fence`             greatest fence
-- A value longer than 64 bytes would double the memory of the hash.
local A_FEW = 8 -- rows in an answer
local ALL = 1000000 -- more than any limit

-- Lua would write a moment as 1.8e+15.
local function integer(number)
  return string.format('%.0f', number)
end

local function parsed(words)
  local options = {}
  for name, value in string.gmatch(words or '', '([%l_]+)=?(%S*)') do
    options[name] = value
  end
  return options
end

-- A server out of memory refuses HSET as the first write of a script, but not after HDEL.
local function begin_writing(key)
  call('HDEL', key, '')
end

local function keep_at_least(key, microseconds)
  local milliseconds = math.ceil(microseconds / 1000)
  if call('PEXPIRE', key, milliseconds, 'GT') == 0 then
    call('PEXPIRE', key, milliseconds, 'NX')
  end
end

local function grant_of(key, number)
  local grant = call('HGET', key, number .. ':')
  local since, ahead, attempt, published = string.match(grant, '^(%d+) (%d+) %d+ %d+ (%d+) (%d+)')
  return {
    since = tonumber(since), fence = since + ahead, attempt = tonumber(attempt), published = tonumber(published),
  }
end

local function call_has_ended(grant)
  return string.find((grant or '') .. ' ', ' ended ', 1, true) ~= nil
end

local function is_cooldown(token)
  return string.sub(token, 1, 1) == '~'
end

local function places_taken_by(token)
  return string.sub(token, 1, 1) == '*' and ALL or 1
end

local function read_places(key, highest)
  local places = {}
  for number = 1, highest do
    local token = call('HGET', key, number) or nil
    local deadline = token and call('HGET', key, token)
    local asked_to_stop = token and not deadline and call('HGET', key, '!' .. token)
    local ends = tonumber(deadline or asked_to_stop or 0)
    places[number] = {
      number = number, token = token, deadline = ends, is_taken = token and ends > now, asked_to_stop = asked_to_stop,
    }
  end
  return places
end

local function set_deadline(key, place, deadline)
  call('HSET', key, (place.asked_to_stop and '!' or '') .. place.token, integer(deadline))
end

local function ask_to_stop(key, place)
  if not place.asked_to_stop then
    place.asked_to_stop = true
    set_deadline(key, place, place.deadline)
    call('HDEL', key, place.token)
  end
end

local function withdraw_successors_request(key, places)
  for _, place in ipairs(places) do
    if place.is_taken and place.asked_to_stop and call('HEXISTS', key, 'broken:' .. place.token) == 0 then
      call('HDEL', key, '!' .. place.token)
      call('HSET', key, place.token, integer(place.deadline))
    end
  end
end

local function forget_token(key, number, token)
  call('HDEL', key, token, '!' .. token, 'broken:' .. token, 'replaced:' .. token, number .. ':c')
end

local function empty_place(key, number, token)
  forget_token(key, number, token)
  call('HDEL', key, number, number .. ':', number .. ':i', number .. ':h', number .. ':n')
end

local function add_row(rows, values)
  for i = 1, 7 do
    rows[#rows + 1] = values[i] or ''
  end
end

-- A row: place, token, deadline, grant, task id, hostname, `<place>:n`.
local function rows_of_holders(key, places, most)
  local taken, rows = {}, {}
  for _, place in ipairs(places) do
    if place.is_taken then
      taken[#taken + 1] = place
    end
  end
  table.sort(taken, function(one, other) return one.deadline < other.deadline end)
  for i = 1, math.min(#taken, most or A_FEW) do
    local number = taken[i].number
    local facts = call('HMGET', key, number .. ':', number .. ':i', number .. ':h', number .. ':n')
    add_row(rows, {number, taken[i].token, integer(taken[i].deadline), unpack(facts)})
  end
  return #taken > 0 and rows or nil
end

-- A row: state, token, deadline, `<published> <due_for> <is_unheard> <rank>`, task id, queue, `<task name>\31<label>`.
local function rows_of_calls(calls, most)
  local rows = {}
  for i = 1, math.min(#calls, most or A_FEW) do
    local each = calls[i]
    local numbers = format('%.0f %.0f %d %.0f', each.published, each.due_for or 0, each.is_unheard and 1 or 0, each.rank or 0)
    local name = (each.task_name or '') .. (each.label and '\31' .. each.label or '')
    add_row(rows, {each.holder_state, each.who, integer(math.max(each.deadline, now)), numbers, each.task_id, each.queue, name})
  end
  return rows
end
