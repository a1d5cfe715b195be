-- The fields of places and holders:
--   `<place>`           the holder's token. ~ begins the token of a cool-down, * a token that takes the whole lock.
--   `<token>`           the holder's deadline. The field is `!<token>` once the holder was asked to stop.
--   `broken:<token>`    the person who has asked the holder to stop
--   `replaced:<token>`  the successor that has asked the holder to stop
--   `<place>:`          the grant: moment, fence minus moment, ttl in milliseconds, pid, attempt, publication, words.
--                       `no-result`: nobody else can read the result. `ended`: the call has ended, its run may go on.
--                       A grant of more than 64 bytes doubles the memory of the hash.
--   `<place>:i`         task id
--   `<place>:h`         hostname
--   `<place>:n`         task name if the lock has another name, then '\31' and the label if there is one
--   `<place>:c`         1 once a copy of the holder's message has come
--   `places`            the highest place in use, if that is not 1
--   `fence`             the greatest fence that was given
local A_FEW = 8 -- holders, or calls that go before, in an answer
local ALL = 1000000 -- more than any limit

local function integer(number)
  return string.format('%.0f', number)
end

local function words_in(text)
  local words = {}
  for name, value in string.gmatch(text or '', '([%l_]+)=?(%S*)') do
    words[name] = value
  end
  return words
end

-- A server out of memory refuses HSET as the first write of a script, and allows HDEL.
local function begin_writing(key)
  call('HDEL', key, '')
end

local function expire_after(key, microseconds)
  local milliseconds = math.ceil(microseconds / 1000)
  if call('PEXPIRE', key, milliseconds, 'GT') == 0 then
    call('PEXPIRE', key, milliseconds, 'NX')
  end
end

local function grant_of(key, place)
  local grant = call('HGET', key, place .. ':')
  local since, ahead, attempt, published = string.match(grant, '^(%d+) (%d+) %d+ %d+ (%d+) (%d+)')
  return {
    since = tonumber(since), fence = since + ahead, attempt = tonumber(attempt), published = tonumber(published),
  }
end

local function has_ended(grant)
  return string.find((grant or '') .. ' ', ' ended ', 1, true) ~= nil
end

local function is_on_hold(token)
  return string.sub(token, 1, 1) == '~'
end

local function places_of(token)
  return string.sub(token, 1, 1) == '*' and ALL or 1
end

local function read_places(key, highest)
  local places = {}
  for place = 1, highest do
    local token = call('HGET', key, place) or nil
    local deadline = token and call('HGET', key, token)
    local asked_to_stop = token and not deadline and call('HGET', key, '!' .. token)
    local ends = tonumber(deadline or asked_to_stop or 0)
    places[place] = {
      place = place, token = token, deadline = ends, alive = token and ends > now, asked_to_stop = asked_to_stop,
    }
  end
  return places
end

local function set_deadline(key, each, deadline)
  call('HSET', key, (each.asked_to_stop and '!' or '') .. each.token, integer(deadline))
end

local function ask_to_stop(key, each)
  if not each.asked_to_stop then
    each.asked_to_stop = true
    set_deadline(key, each, each.deadline)
    call('HDEL', key, each.token)
  end
end

-- Take back a successor's request to stop; a person's request stays.
local function let_holders_stay(key, places)
  for _, each in ipairs(places) do
    if each.alive and each.asked_to_stop and call('HEXISTS', key, 'broken:' .. each.token) == 0 then
      call('HDEL', key, '!' .. each.token)
      call('HSET', key, each.token, integer(each.deadline))
    end
  end
end

local function forget_token(key, place, token)
  call('HDEL', key, token, '!' .. token, 'broken:' .. token, 'replaced:' .. token, place .. ':c')
end

local function empty_place(key, place, token)
  forget_token(key, place, token)
  call('HDEL', key, place, place .. ':', place .. ':i', place .. ':h', place .. ':n')
end

-- A row of an answer is seven values: place, token, deadline, grant, task id, hostname, task name and label.
local function add_row(rows, values)
  for i = 1, 7 do
    rows[#rows + 1] = values[i] or ''
  end
end

-- Rows of a few holders, sorted by deadline; nil without holders.
local function described(key, places, most)
  local alive, rows = {}, {}
  for _, each in ipairs(places) do
    if each.alive then
      alive[#alive + 1] = each
    end
  end
  table.sort(alive, function(one, other) return one.deadline < other.deadline end)
  for i = 1, math.min(#alive, most or A_FEW) do
    local place = alive[i].place
    local facts = call('HMGET', key, place .. ':', place .. ':i', place .. ':h', place .. ':n')
    add_row(rows, {place, alive[i].token, integer(alive[i].deadline), unpack(facts)})
  end
  return #alive > 0 and rows or nil
end

-- Rows of calls that hold nothing: word, token, deadline, numbers, task id, queue of the message, task name and label. The
-- numbers, 0 if unknown: publication, `due_for` of a mark, 1 if a turn is unheard, rank of a turn.
local function described_calls(calls, most)
  local rows = {}
  for i = 1, math.min(#calls, most or A_FEW) do
    local each = calls[i]
    local numbers = format('%.0f %.0f %d %.0f', each.published, each.due_for or 0, each.is_unheard and 1 or 0, each.rank or 0)
    local name = (each.task_name or '') .. (each.label and '\31' .. each.label or '')
    add_row(rows, {each.word, each.token, integer(math.max(each.deadline, now)), numbers, each.task_id, each.queue, name})
  end
  return rows
end
